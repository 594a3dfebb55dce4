/* Writes call rings as native/intercept does: ring_writer WAY [NUMBER].
 *
 * threads N: N calls in each of four threads, of a group each, all completed. forever N: calls of one group, N of them
 * always open, until it is killed. fork: one call here, then one in a child. speed N: N calls, and prints nanoseconds for
 * each, and for one through an empty wrapper. groups N: one call in each of N groups. dropped: a send whose object is freed
 * unseen, then a receive at its address, which is completed.
 */
#include "../../../native/intercept/call_ring.h"

#include <stdio.h>
#include <sys/wait.h>

static void describe(struct ring_group *group, void *with) {
    uint64_t *id = with;
    memcpy(group->family, "test", 5);
    group->rank = 1;
    group->size = 4;
    group->id = *id;
}

static int group_of(struct ring *ring, uint64_t id) { return ring_group_of(ring, id, describe, &id); }

static long count;

static void *write_calls(void *with) {
    struct ring *ring = ring_of_process();
    int group = group_of(ring, (uint64_t)(uintptr_t)with);
    for (long call = 0; call < count; call++) {
        struct ring_call what = {.op = OP_ALL_REDUCE, .dtype = DTYPE_FLOAT32, .peer = -1, .count = 7};
        ring_completed(ring, ring_entered(ring, group, what));
    }
    return NULL;
}

static uint64_t passed_on;
__attribute__((noinline)) static void real_call(uint64_t value) { __atomic_add_fetch(&passed_on, value, __ATOMIC_RELAXED); }

__attribute__((noinline)) static void empty_wrapper(uint64_t value) { real_call(value); }

__attribute__((noinline)) static void wrapper(uint64_t value) {
    struct ring *ring = ring_of_process();
    int group = ring ? group_of(ring, 5) : RING_NONE;
    struct ring_call what = {.op = OP_ALL_REDUCE, .dtype = DTYPE_FLOAT32, .peer = -1, .count = value};
    uint64_t index = group == RING_NONE ? RING_NOWHERE : ring_entered(ring, group, what);
    real_call(value);
    ring_completed(ring, index);
}

static double nanoseconds(void (*call)(uint64_t)) {
    uint64_t began = ring_clock();
    for (long number = 0; number < count; number++) call((uint64_t)number);
    return (double)(ring_clock() - began) / (double)count;
}

int main(int arguments, char **argument) {
    const char *way = arguments > 1 ? argument[1] : "";
    count = arguments > 2 ? atol(argument[2]) : 1;
    if (!strcmp(way, "threads")) {
        pthread_t threads[4];
        for (uintptr_t number = 0; number < 4; number++)
            pthread_create(&threads[number], NULL, write_calls, (void *)(number + 1));
        for (int number = 0; number < 4; number++) pthread_join(threads[number], NULL);
    } else if (!strcmp(way, "forever")) {
        struct ring *ring = ring_of_process();
        int group = group_of(ring, 9);
        puts("writes");
        fflush(stdout);
        for (uint64_t call = 0;; call++) {
            struct ring_call what = {.op = OP_BROADCAST, .dtype = DTYPE_INT64, .peer = 2, .count = call + 1};
            ring_entered(ring, group, what);
            if (call >= (uint64_t)count) ring_completed(ring, call - (uint64_t)count);
        }
    } else if (!strcmp(way, "fork")) {
        write_calls((void *)1);
        if (fork() == 0) {
            _exit(ring_of_process() ? 1 : 0);
        }
        int status;
        wait(&status);
        return WEXITSTATUS(status);
    } else if (!strcmp(way, "groups")) {
        struct ring *ring = ring_of_process();
        for (long number = 0; ring && number < count; number++) {
            int group = group_of(ring, (uint64_t)number + 1);
            struct ring_call what = {.op = OP_BARRIER, .peer = -1};
            ring_entered(ring, group, what);
        }
    } else if (!strcmp(way, "dropped")) {
        struct ring *ring = ring_of_process();
        int group = group_of(ring, 1);
        struct ring_call send = {.op = OP_SEND, .state = CALL_IN_FLIGHT, .peer = 1};
        struct ring_call receive = {.op = OP_RECV, .state = CALL_IN_FLIGHT, .peer = 2};
        ring_await(4096, ring_entered(ring, group, send));
        ring_await(4096, ring_entered(ring, group, receive));
        ring_waited_for(ring, 4096);
        ring_arrived(ring, 4096);
    } else if (!strcmp(way, "speed")) {
        nanoseconds(wrapper); /* warm */
        printf("%.2f %.2f\n", nanoseconds(wrapper), nanoseconds(empty_wrapper));
    } else {
        return 2;
    }
    return 0;
}
