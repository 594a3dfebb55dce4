/* A box of a row-major tensor, taken out of its bytes as they come: each run of bytes goes to its place in a target.
 *
 * The runs begin at `first` and then every `source_step` of each level, outermost first; a step is at least as long as
 * all that its level encloses.
 */
#ifndef RESILIO_SCATTER_H
#define RESILIO_SCATTER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "stream.h"

#define MAX_LEVELS 32

struct level {
    int64_t count, source_step, target_step;
};

struct box {
    int64_t first, target_first, run; /* bytes */
    int level_count;                  /* 1 to MAX_LEVELS */
    struct level levels[];
};

struct place { /* a run: its number on each level, and where it begins */
    int64_t index[MAX_LEVELS];
    int64_t source, target;
};

/* The next run but one of the innermost level only: that one's are copied in a row. 0: there is none. */
static int next_row(const struct box *box, struct place *place) {
    for (int level = box->level_count - 2; level >= 0; level--) {
        const struct level *here = &box->levels[level];
        if (++place->index[level] < here->count) {
            place->source += here->source_step;
            place->target += here->target_step;
            return 1;
        }
        place->source -= (here->count - 1) * here->source_step;
        place->target -= (here->count - 1) * here->target_step;
        place->index[level] = 0;
    }
    return 0;
}

/* The row (all runs of the innermost level) in which the first run lies that ends behind byte `at`; its number there is
 * place->index of that level, which may be its count: then the row is over. */
static void find_row(const struct box *box, int64_t at, struct place *place) {
    int last = box->level_count - 1;
    int64_t left = at - box->first;
    memset(place, 0, sizeof *place);
    place->source = box->first;
    place->target = box->target_first;
    if (left <= 0) return;
    for (int level = 0; level <= last; level++) {
        const struct level *here = &box->levels[level];
        int64_t index = left / here->source_step;
        if (level == last) {
            index += left - index * here->source_step >= box->run;
            place->index[last] = index < here->count ? index : here->count;
            return;
        }
        if (index >= here->count) index = here->count - 1; /* behind its last one: so are all inner ones */
        left -= index * here->source_step;
        place->index[level] = index;
        place->source += index * here->source_step;
        place->target += index * here->target_step;
    }
}

#define COPY_RUNS(size)                                                                                       \
    for (; index < end; index++, source += here->source_step, target += here->target_step) memcpy(target, source, size)

#if defined(__x86_64__)
#define STREAMED 1024 /* bytes of a run: with shorter ones a plain copy is as fast */
#define UNIT 16

/* Whole UNITs past the caches. `ahead`: where it goes on afterwards, which the processor does not foresee. */
static inline void stream_units(uint8_t *target, const uint8_t *source, int64_t size, int64_t ahead) {
    const __m128i *from = (const __m128i *)source, *last = from + size / UNIT;
    __m128i *to = (__m128i *)target;
    for (; last - from >= 4; from += 4, to += 4) {
        __builtin_prefetch((const uint8_t *)from + ahead);
        stream_line(to, from);
    }
    while (from < last) _mm_stream_si128(to++, _mm_loadu_si128(from++));
}

static void stream_runs(const struct box *box, const struct level *here, uint8_t *target, const uint8_t *source,
                        int64_t index, int64_t end) {
    for (; index < end; index++, source += here->source_step, target += here->target_step)
        stream_units(target, source, box->run, here->source_step);
    _mm_sfence();
}

static int can_stream(const struct box *box, const struct level *here, const uint8_t *target) {
    return box->run >= STREAMED && (box->run | (intptr_t)target | here->target_step) % UNIT == 0;
}
#endif

/* Whole runs of a row, from pointers to the first one. Small ones with sizes that the compiler knows. */
static void copy_runs(const struct box *box, const struct level *here, uint8_t *target, const uint8_t *source,
                      int64_t index, int64_t end) {
#if defined(__x86_64__)
    if (can_stream(box, here, target)) {
        stream_runs(box, here, target, source, index, end);
        return;
    }
#endif
    switch (box->run) {
    case 1: COPY_RUNS(1); break;
    case 2: COPY_RUNS(2); break;
    case 4: COPY_RUNS(4); break;
    case 8: COPY_RUNS(8); break;
    case 16: COPY_RUNS(16); break;
    default: COPY_RUNS((size_t)box->run);
    }
}

/* All of it, which is not needed soon. */
static void copy_far(uint8_t *target, const uint8_t *source, size_t size) {
#if defined(__x86_64__)
    if (size >= STREAMED) {
        size_t head = -(uintptr_t)target % UNIT, units = (size - head) / UNIT * UNIT;
        memcpy(target, source, head);
        stream_units(target + head, source + head, (int64_t)units, 4096);
        _mm_sfence();
        target += head + units;
        source += head + units;
        size -= head + units;
    }
#endif
    memcpy(target, source, size);
}

/* `data`: `size` bytes of the tensor from byte `at` on. */
static void scatter(const struct box *box, uint8_t *target, int64_t at, const uint8_t *data, int64_t size) {
    const struct level *here = &box->levels[box->level_count - 1];
    struct place place;
    int64_t end = at + size;
    find_row(box, at, &place);
    int64_t index = place.index[box->level_count - 1];
    for (;; index = 0) {
        while (index < here->count) {
            int64_t from = place.source + index * here->source_step;
            uint8_t *to = target + place.target + index * here->target_step;
            if (from >= end) return;
            int64_t skip = from < at ? at - from : 0;
            if (skip || from + box->run > end) { /* a part of it lies in what came before, or comes */
                int64_t stop = from + box->run < end ? box->run : end - from;
                memcpy(to + skip, data + (from + skip - at), (size_t)(stop - skip));
                if (from + box->run > end) return;
                index++;
                continue;
            }
            int64_t whole_end = (end - box->run - place.source) / here->source_step + 1;
            if (whole_end > here->count) whole_end = here->count;
            copy_runs(box, here, to, data + (from - at), index, whole_end);
            index = whole_end;
        }
        if (!next_row(box, &place)) return;
    }
}

#endif
