/* CRC32C, alone or while copying; every function takes and returns the inverted register.
 *
 * Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4. Three ways: tables; the CPU's instruction, which
 * takes 3 cycles but starts one each cycle, so three independent streams run side by side and are joined with tables (the
 * method of Mark Adler's crc32c.c and Intel's "Fast CRC Computation for iSCSI Polynomial"); carry-less products (folding.h).
 */
#ifndef RESILIO_CHECKSUM_H
#define RESILIO_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "crc_instructions.h"
#include "stream.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include "folding.h"
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define LONG 4096  /* bytes of one of the three streams: one page, a multiple of a cache line */
#define SHORT 256

static uint32_t portable_table[8][256];
static uint32_t long_shift[4][256];
static uint32_t short_shift[4][256];

/* What the processor has, and what is used of it. */
enum instructions { TABLES, CRC32, FOLDING };
static enum instructions available, used;

/* ---- tables ---------------------------------------------------------------------------------------------------- */

static uint32_t gf2_times(const uint32_t *matrix, uint32_t vector) {
    uint32_t sum = 0;
    for (; vector; vector >>= 1, matrix++)
        if (vector & 1) sum ^= *matrix;
    return sum;
}

/* The operator that appends `length` zero bytes (a power of two) to a CRC, as four tables of bytes. */
static void build_shift(uint32_t tables[4][256], size_t length) {
    uint32_t even[32], odd[32];
    odd[0] = POLYNOMIAL; /* one zero bit */
    for (int n = 1; n < 32; n++) odd[n] = 1u << (n - 1);
    uint32_t *from = odd, *to = even;
    for (size_t bits = 1; bits < length * 8; bits <<= 1) { /* each squaring doubles the number of zero bits */
        for (int n = 0; n < 32; n++) to[n] = gf2_times(from, from[n]);
        uint32_t *swap = from;
        from = to;
        to = swap;
    }
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t n = 0; n < 256; n++) tables[byte][n] = gf2_times(from, n << (8 * byte));
}

#if defined(__x86_64__)
/* From the processor itself: what __builtin_cpu_supports reads is zero where a compiler's runtime library leaves it so. */
static enum instructions found_instructions(void) {
    const unsigned sse42 = 1u << 20, pclmul = 1u << 1, osxsave = 1u << 27, avx2 = 1u << 5, vpclmulqdq = 1u << 10;
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & sse42)) return TABLES;
    unsigned first = c;
    if (!(first & osxsave) || !(first & pclmul) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return CRC32;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* does the system keep the wide registers? */
    return (saved & 6) == 6 && (b & avx2) && (c & vpclmulqdq) ? FOLDING : CRC32;
}
#endif

static uint32_t shift(uint32_t tables[4][256], uint32_t crc) {
    return tables[0][crc & 0xff] ^ tables[1][(crc >> 8) & 0xff] ^ tables[2][(crc >> 16) & 0xff] ^ tables[3][crc >> 24];
}

static void build_tables(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >> 1) ^ POLYNOMIAL : crc >> 1;
        portable_table[0][n] = crc;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 1; k < 8; k++) {
            uint32_t crc = portable_table[k - 1][n];
            portable_table[k][n] = portable_table[0][crc & 0xff] ^ (crc >> 8);
        }
    build_shift(long_shift, LONG);
    build_shift(short_shift, SHORT);
#if defined(__x86_64__)
    build_folding_factors();
    available = found_instructions();
#elif defined(__aarch64__)
    available = getauxval(AT_HWCAP) & (1 << 7) ? CRC32 : TABLES; /* HWCAP_CRC32 */
#endif
    used = available;
}

/* ---- checksum -------------------------------------------------------------------------------------------------- */

static uint32_t crc_portable(uint32_t crc, const uint8_t *data, size_t size) {
    while (size >= 8) {
        uint32_t low, high;
        low = crc ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
        high = (uint32_t)data[4] | (uint32_t)data[5] << 8 | (uint32_t)data[6] << 16 | (uint32_t)data[7] << 24;
        crc = portable_table[7][low & 0xff] ^ portable_table[6][(low >> 8) & 0xff] ^
              portable_table[5][(low >> 16) & 0xff] ^ portable_table[4][low >> 24] ^ portable_table[3][high & 0xff] ^
              portable_table[2][(high >> 8) & 0xff] ^ portable_table[1][(high >> 16) & 0xff] ^
              portable_table[0][high >> 24];
        data += 8;
        size -= 8;
    }
    while (size--) crc = portable_table[0][(crc ^ *data++) & 0xff] ^ (crc >> 8);
    return crc;
}

#ifdef HARDWARE_TARGET
static inline uint64_t load8(const uint8_t *data) {
    uint64_t value;
    memcpy(&value, data, 8);
    return value;
}

HARDWARE_TARGET static uint64_t three_streams(uint64_t crc, const uint8_t *data, size_t stream,
                                              uint32_t tables[4][256]) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < stream; i += 8) {
        crc = CRC8(crc, load8(data + i));
        second = CRC8(second, load8(data + stream + i));
        third = CRC8(third, load8(data + 2 * stream + i));
    }
    crc = shift(tables, (uint32_t)crc) ^ second;
    return shift(tables, (uint32_t)crc) ^ third;
}

HARDWARE_TARGET static uint32_t crc_hardware(uint32_t start, const uint8_t *data, size_t size) {
    uint64_t crc = start;
    while (size >= 3 * LONG) {
        crc = three_streams(crc, data, LONG, long_shift);
        data += 3 * LONG;
        size -= 3 * LONG;
    }
    while (size >= 3 * SHORT) {
        crc = three_streams(crc, data, SHORT, short_shift);
        data += 3 * SHORT;
        size -= 3 * SHORT;
    }
    for (; size >= 8; data += 8, size -= 8) crc = CRC8(crc, load8(data));
    while (size--) crc = CRC1(crc, *data++);
    return (uint32_t)crc;
}
#else
#define crc_hardware crc_portable
#endif

static uint32_t checksum(uint32_t crc, const uint8_t *data, size_t size) {
#if defined(__x86_64__)
    if (used == FOLDING && size >= FOLDED) {
        size_t folded = size - size % FOLDED;
        crc = crc_folding(crc, data, folded);
        data += folded;
        size -= folded;
    }
#endif
    return used == TABLES ? crc_portable(crc, data, size) : crc_hardware(crc, data, size);
}

/* ---- copy ------------------------------------------------------------------------------------------------------ */

#define PIECE (3 * LONG) /* stays in the first-level cache between checksum and copy */

static uint32_t copy_pieces(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size) {
    while (size) {
        size_t piece = size < PIECE ? size : PIECE;
        crc = checksum(crc, source, piece);
        memcpy(target, source, piece);
        source += piece;
        target += piece;
        size -= piece;
    }
    return crc;
}

#if defined(__x86_64__)
#define STREAM_FROM (256 * 1024)

/* Whole pieces past the caches to a cache line: an arena is read again much later, so loading its lines first would be
 * waste. Copied first: read in one stream, memory gives them fastest; their three streams are then in the cache. */
static uint32_t stream_pieces(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size) {
    for (; size; source += PIECE, target += PIECE, size -= PIECE) {
        for (size_t at = 0; at < PIECE; at += LINE)
            stream_line((__m128i *)(target + at), (const __m128i *)(source + at));
        crc = checksum(crc, source, PIECE);
    }
    _mm_sfence();
    return crc;
}
#endif

static uint32_t copy_checksum(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size) {
#if defined(__x86_64__)
    if (used != TABLES && size >= STREAM_FROM) {
        size_t head = -(uintptr_t)target % LINE, whole = (size - head) / PIECE * PIECE;
        crc = copy_pieces(crc, target, source, head);
        crc = (used == FOLDING ? stream_folding : stream_pieces)(crc, target + head, source + head, whole);
        target += head + whole;
        source += head + whole;
        size -= head + whole;
    }
#endif
    return copy_pieces(crc, target, source, size);
}

#endif
