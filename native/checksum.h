/* CRC32C, alone or while copying; every function takes and returns the inverted register.
 *
 * Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4. The CPU's instruction takes 3 cycles but starts one
 * each cycle, so three independent streams run side by side and are joined with tables (the method of Mark Adler's
 * crc32c.c and Intel's "Fast CRC Computation for iSCSI Polynomial").
 */
#ifndef RESILIO_CHECKSUM_H
#define RESILIO_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HARDWARE_TARGET __attribute__((target("sse4.2")))
#define CRC8(crc, value) _mm_crc32_u64((crc), (value))
#define CRC1(crc, value) _mm_crc32_u8((uint32_t)(crc), (value))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define HARDWARE_TARGET
static inline uint64_t CRC8(uint64_t crc, uint64_t value) {
    uint32_t result = (uint32_t)crc;
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(result) : "r"(value));
    return result;
}
static inline uint64_t CRC1(uint64_t crc, uint8_t value) {
    uint32_t result = (uint32_t)crc;
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(result) : "r"((uint32_t)value));
    return result;
}
#endif

#define POLYNOMIAL 0x82f63b78u
#define LONG 4096  /* bytes of one of the three streams: one page, a multiple of a cache line */
#define SHORT 256

static uint32_t portable_table[8][256];
static uint32_t long_shift[4][256];
static uint32_t short_shift[4][256];
static int has_hardware;

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
    has_hardware = __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)
    has_hardware = (getauxval(AT_HWCAP) & (1 << 7)) != 0; /* HWCAP_CRC32 */
#endif
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
    return has_hardware ? crc_hardware(crc, data, size) : crc_portable(crc, data, size);
}

/* ---- copy ------------------------------------------------------------------------------------------------------ */

#define PIECE (3 * LONG)

#if defined(__x86_64__)
#define STREAM_FROM (256 * 1024)

/* One cache line past the caches: an arena is read again much later, so loading its lines first would be waste. */
static inline void stream_line(uint8_t *target, const uint8_t *source) {
    __m128i a = _mm_loadu_si128((const __m128i *)source);
    __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
    _mm_stream_si128((__m128i *)target, a);
    _mm_stream_si128((__m128i *)(target + 16), b);
    _mm_stream_si128((__m128i *)(target + 32), c);
    _mm_stream_si128((__m128i *)(target + 48), d);
}

/* A piece, its three streams side by side, line by line: memory reads and writes overlap with the checksums. */
HARDWARE_TARGET static uint64_t copy_piece(uint64_t crc, uint8_t *target, const uint8_t *source) {
    uint64_t second = 0, third = 0;
    for (size_t line = 0; line < LONG; line += 64) {
        const uint8_t *data = source + line;
        for (size_t i = 0; i < 64; i += 8) {
            crc = CRC8(crc, load8(data + i));
            second = CRC8(second, load8(data + LONG + i));
            third = CRC8(third, load8(data + 2 * LONG + i));
        }
        stream_line(target + line, data);
        stream_line(target + LONG + line, data + LONG);
        stream_line(target + 2 * LONG + line, data + 2 * LONG);
    }
    crc = shift(long_shift, (uint32_t)crc) ^ second;
    return shift(long_shift, (uint32_t)crc) ^ third;
}

/* Does the target lie a little further into its page than the source? The processor compares the last 12 bits of
 * addresses: it takes each load for one of what was stored just before, and waits. */
static inline int is_just_ahead(const uint8_t *target, const uint8_t *source) {
    uintptr_t ahead = ((uintptr_t)target - (uintptr_t)source) & 4095;
    return ahead > 0 && ahead < 128;
}

/* A piece for such a target: its checksum, then copied from its end on, where no load follows a store like that. */
HARDWARE_TARGET static uint64_t copy_piece_backwards(uint64_t crc, uint8_t *target, const uint8_t *source) {
    crc = three_streams(crc, source, LONG, long_shift);
    for (size_t line = PIECE; line; line -= 64) stream_line(target + line - 64, source + line - 64);
    return crc;
}
#endif

static uint32_t copy_checksum(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size) {
#if defined(__x86_64__)
    if (has_hardware && size >= STREAM_FROM && ((uintptr_t)target & 15) == 0) {
        uint64_t (*copy)(uint64_t, uint8_t *, const uint8_t *) =
            is_just_ahead(target, source) ? copy_piece_backwards : copy_piece;
        for (; size >= PIECE; source += PIECE, target += PIECE, size -= PIECE)
            crc = (uint32_t)copy(crc, target, source);
        _mm_sfence();
    }
#endif
    while (size) { /* pieces that stay in the first-level cache between checksum and copy */
        size_t piece = size < PIECE ? size : PIECE;
        crc = checksum(crc, source, piece);
        memcpy(target, source, piece);
        source += piece;
        target += piece;
        size -= piece;
    }
    return crc;
}

#endif
