/* CRC32C by carry-less products, with or without a copy in the same pass; x86 processors with VPCLMULQDQ (AMD from Zen 3,
 * Intel from Ice Lake on).
 *
 * Four sums of 32 bytes each stand for all that was read: to append 128 bytes is to multiply them by x^1024 and to add
 * what comes (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). That
 * takes less time than memory takes to give the bytes, so a copy with a checksum costs no more than the copy.
 */
#ifndef RESILIO_FOLDING_H
#define RESILIO_FOLDING_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "crc_instructions.h"

#define FOLDING_TARGET __attribute__((target("avx2,vpclmulqdq,pclmul," SSE42)))
#define FOLDED 128 /* bytes of one step */

/* Factors for 128-bit words that move ahead by so many bits: one for the earlier half of a word, one for the later. */
static const unsigned folding_bits[] = {1024, 768, 512, 256, 128};
enum { BY_1024, BY_768, BY_512, BY_256, BY_128 };
static uint64_t folding_factors[5][2];

/* x^n modulo the polynomial. */
static uint32_t power_of_x(unsigned n) {
    uint32_t power = 0x80000000u;
    while (n--) power = power & 1 ? (power >> 1) ^ POLYNOMIAL : power >> 1;
    return power;
}

/* Bits are in the order of the CRC: the lowest one is the highest power. A factor of 64 bits begins with x^64, and its
 * product with half a word, of 127 bits, with the same x^127 as a word; the remainder, of 32 bits, lies in its lower half,
 * so it is that of 33 powers less. The earlier half of a word is 64 powers ahead of the later one. */
static void build_folding_factors(void) {
    for (size_t i = 0; i < sizeof folding_bits / sizeof *folding_bits; i++) {
        folding_factors[i][0] = power_of_x(folding_bits[i] + 64 - 33);
        folding_factors[i][1] = power_of_x(folding_bits[i] - 33);
    }
}

FOLDING_TARGET static inline __m128i factors(int by) {
    return _mm_loadu_si128((const __m128i *)folding_factors[by]);
}

FOLDING_TARGET static inline __m256i fold(__m256i sum, __m256i factor, __m256i next) {
    __m256i earlier = _mm256_clmulepi64_epi128(sum, factor, 0x00), later = _mm256_clmulepi64_epi128(sum, factor, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(earlier, later), next);
}

FOLDING_TARGET static inline __m256i fold_by(__m256i sum, int by, __m256i next) {
    return fold(sum, _mm256_broadcastsi128_si256(factors(by)), next);
}

/* A multiple of FOLDED bytes, at least one, past the caches to `target` (on a cache line), or nowhere if it is NULL. */
FOLDING_TARGET static inline __attribute__((always_inline)) uint32_t fold_all(uint32_t crc, uint8_t *target,
                                                                              const uint8_t *source, size_t size) {
    const __m256i factor = _mm256_broadcastsi128_si256(factors(BY_1024));
    const __m256i begin = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc)); /* a CRC is added to what follows */
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t at = 0; at < size; at += FOLDED) {
        const __m256i *from = (const __m256i *)(source + at);
        __m256i w = _mm256_loadu_si256(from), x = _mm256_loadu_si256(from + 1), y = _mm256_loadu_si256(from + 2),
                z = _mm256_loadu_si256(from + 3);
        if (target != NULL) {
            __m256i *to = (__m256i *)(target + at);
            _mm256_stream_si256(to, w);
            _mm256_stream_si256(to + 1, x);
            _mm256_stream_si256(to + 2, y);
            _mm256_stream_si256(to + 3, z);
        }
        a = fold(a, factor, at == 0 ? _mm256_xor_si256(w, begin) : w);
        b = fold(b, factor, x);
        c = fold(c, factor, y);
        d = fold(d, factor, z);
    }
    d = fold_by(c, BY_256, fold_by(b, BY_512, fold_by(a, BY_768, d)));
    __m256i last = fold_by(_mm256_permute2x128_si256(d, d, 0x08), BY_128, d); /* the earlier word into the later one */
    __m128i word = _mm256_extracti128_si256(last, 1);
    uint64_t rest = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(word));
    return (uint32_t)_mm_crc32_u64(rest, (uint64_t)_mm_extract_epi64(word, 1));
}

FOLDING_TARGET static uint32_t crc_folding(uint32_t crc, const uint8_t *data, size_t size) {
    return fold_all(crc, NULL, data, size);
}

FOLDING_TARGET static uint32_t stream_folding(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size) {
    crc = fold_all(crc, target, source, size);
    _mm_sfence();
    return crc;
}

#endif
