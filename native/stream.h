/* Copies past the caches: what they write is read again much later, so loading its lines first would be waste. */
#ifndef RESILIO_STREAM_H
#define RESILIO_STREAM_H

#if defined(__x86_64__)
#include <emmintrin.h>

#define LINE 64

/* `to` is a multiple of 16. _mm_sfence() comes after the last one. */
static inline void stream_line(__m128i *to, const __m128i *from) {
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2),
            d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}
#endif

#endif
