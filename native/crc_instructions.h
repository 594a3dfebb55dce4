/* The polynomial of CRC32C, and the processor's instruction for it.
 *
 * CRC8 and CRC1 append 8 bytes or one to the inverted register, where HARDWARE_TARGET is defined.
 */
#ifndef RESILIO_CRC_INSTRUCTIONS_H
#define RESILIO_CRC_INSTRUCTIONS_H

#include <stdint.h>

#define POLYNOMIAL 0x82f63b78u

#if defined(__x86_64__)
#include <nmmintrin.h>
#if defined(__clang__) && __clang_major__ >= 14 /* to clang the instruction is not a part of sse4.2 */
#define SSE42 "sse4.2,crc32"
#else
#define SSE42 "sse4.2"
#endif
#define HARDWARE_TARGET __attribute__((target(SSE42)))
#define CRC8(crc, value) _mm_crc32_u64((crc), (value))
#define CRC1(crc, value) _mm_crc32_u8((uint32_t)(crc), (value))
#elif defined(__aarch64__)
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

#endif
