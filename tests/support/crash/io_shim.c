/* For tests: stands between a process and the C library (LD_PRELOAD) and harms it at a chosen I/O call.
 *
 * Counted are the calls that change anything below the given directories, by path or by file descriptor, and writes that
 * are handed to io_uring. Each is one line of the log: number, name, path, then a second path or offset and size. Call
 * number `at` is never made (SIGKILL), made by half (a torn write, then SIGKILL), refused with an error, once or from
 * then on, or does not return before a file appears, and no other call on a path below the directories either: a hung
 * file system; or it is made just after the parent was killed. Nothing happens before shim_arm is called; forked children
 * inherit what was armed. After shim_share it lies in a file, which programs that are started find in SHIM_STATE: the
 * count goes on there.
 * With SHIM_NO_IO_URING in the environment there is no io_uring, as in many containers; with SHIM_NO_EXCHANGE two names
 * cannot change places, as on NFS.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "io_shim_state.h"

#define HALF (-1) /* what `harm` answers for a write to be torn */

static __thread int owed;         /* error that the next write of this thread shall have */
static __thread int inside_shim;  /* our own calls are not counted */

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int below(const char *path) {
    for (int i = 0; i < 4; i++) {
        size_t length = strlen(armed.directories[i]);
        if (length && !strncmp(path, armed.directories[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

static void path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static void path_at(int at, const char *name, char *path) {
    char base[PATH_MAX] = "";
    if (!strncmp(name, "/proc/self/fd/", 14)) {
        path_of(atoi(name + 14), path);
    } else if (*name == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        if (at != AT_FDCWD) path_of(at, base);
        else if (!getcwd(base, sizeof base)) base[0] = 0;
        snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
    }
}

static void say(const char *text, int length) {
    if (!armed.log[0]) return;
    int log = (int)syscall(SYS_openat, AT_FDCWD, armed.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0 || syscall(SYS_write, log, text, (size_t)length) != length) abort();
    syscall(SYS_close, log);
}

static void wait_for_release(void) {
    while (syscall(SYS_faccessat, AT_FDCWD, armed.release, F_OK) != 0) usleep(500);
}

/* Count a call; 0: it may be made, HALF, or the error that it is to have. */
static int harm(const char *call, const char *path, const char *more, int tearable) {
    if (armed.mode == OFF || inside_shim || !below(path)) return 0;
    int saved = errno;
    inside_shim = 1;
    long number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    char line[2 * PATH_MAX + 100];
    say(line, snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\n", number, call, path, more));
    int result = 0;
    if (number >= armed.at && armed.mode == HANG && syscall(SYS_faccessat, AT_FDCWD, armed.release, F_OK) != 0) {
        say(line, snprintf(line, sizeof line, "%ld\tblocked\t%s\t\n", number, path));
        wait_for_release();
    }
    if (number == armed.at && armed.mode == TEAR && tearable) result = HALF;
    else if (number == armed.at && (armed.mode == KILL || armed.mode == TEAR)) raise(SIGKILL);
    else if (number == armed.at && armed.mode == ORPHAN) kill(getppid(), SIGKILL);
    else if (armed.mode == FAIL_ONCE ? number == armed.at : armed.mode == FAIL_ON && number >= armed.at)
        result = armed.error;
    inside_shim = 0;
    errno = saved;
    return result;
}

/* Calls that change nothing take part in a hang. */
static void look(int at, const char *name) {
    if (armed.mode != HANG || inside_shim || __atomic_load_n(&calls, __ATOMIC_SEQ_CST) < armed.at) return;
    int saved = errno;
    inside_shim = 1;
    char path[PATH_MAX];
    path_at(at, name, path);
    if (below(path)) wait_for_release();
    inside_shim = 0;
    errno = saved;
}

static int refused(int error) {
    if (error == 0) return 0;
    errno = error;
    return 1;
}

static int harm_fd(const char *call, int fd, const char *more, int tearable) {
    if (armed.mode == OFF || inside_shim) return 0;
    char path[PATH_MAX];
    int saved = errno;
    path_of(fd, path);
    errno = saved;
    return harm(call, path, more, tearable);
}

static int harm_at(const char *call, int at, const char *name, const char *more) {
    if (armed.mode == OFF || inside_shim) return 0;
    char path[PATH_MAX];
    path_at(at, name, path);
    return harm(call, path, more, 0);
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

static int changes(int flags) { return (flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE; }

#define OPEN(name, leading, at, path, ...)                                           \
    int name leading {                                                              \
        REAL(name);                                                                 \
        va_list list;                                                               \
        va_start(list, flags);                                                      \
        mode_t mode = changes(flags) ? va_arg(list, mode_t) : 0;                    \
        va_end(list);                                                               \
        if (changes(flags)) {                                                       \
            char text[32];                                                          \
            snprintf(text, sizeof text, "%s", flags & O_TRUNC ? "truncate" : "");   \
            if (refused(harm_at("open", at, path, text))) return -1;                \
        } else {                                                                    \
            look(at, path);                                                         \
        }                                                                           \
        return real(__VA_ARGS__, flags, mode);                                      \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPEN(openat, (int at, const char *path, int flags, ...), at, path, at, path)
OPEN(openat64, (int at, const char *path, int flags, ...), at, path, at, path)

/* ---- writing -------------------------------------------------------------------------------------------------- */

static int owes(void) {
    int error = owed;
    owed = 0;
    return error;
}

static int harm_write(const char *call, int fd, off_t offset, size_t size) {
    char range[64];
    snprintf(range, sizeof range, "%lld\t%zu", (long long)offset, size);
    int error = owes();
    return error ? error : harm_fd(call, fd, range, 1);
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int error = harm_write("write", fd, -1, size);
    if (error == HALF) {
        if (real(fd, data, size / 2) >= 0) raise(SIGKILL);
    } else if (refused(error)) return -1;
    return real(fd, data, size);
}

#define PWRITE(name, offset_type)                                                                      \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) {                          \
        REAL(name);                                                                                    \
        int error = harm_write("pwrite", fd, offset, size);                                            \
        if (error == HALF) {                                                                           \
            if (real(fd, data, size > 8192 ? size / 2 / 4096 * 4096 : size / 2, offset) >= 0) raise(SIGKILL); \
        } else if (refused(error)) return -1;                                                          \
        return real(fd, data, size, offset);                                                           \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    return refused(harm_fd("writev", fd, "-1\t-1", 0)) ? -1 : real(fd, parts, count);
}
#define PWRITEV(name, offset_type)                                                        \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset) {      \
        REAL(name);                                                                       \
        return refused(harm_fd("pwritev", fd, "-1\t-1", 0)) ? -1 : real(fd, parts, count, offset); \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range);
    return refused(harm_fd("copy_file_range", out, "-1\t-1", 0)) ? -1 : real(in, from, out, to, size, flags);
}
#define SENDFILE(name, offset_type)                                                          \
    ssize_t name(int out, int in, offset_type *offset, size_t size) {                        \
        REAL(name);                                                                          \
        return refused(harm_fd("sendfile", out, "-1\t-1", 0)) ? -1 : real(out, in, offset, size); \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

/* ---- one descriptor, one path, two paths ---------------------------------------------------------------------- */

#define BY_FD(name, call, leading, ...)                                        \
    int name leading {                                                         \
        REAL(name);                                                            \
        return refused(harm_fd(call, fd, "", 0)) ? -1 : real(__VA_ARGS__);     \
    }
BY_FD(fsync, "fsync", (int fd), fd)
BY_FD(fdatasync, "fsync", (int fd), fd)
BY_FD(ftruncate, "ftruncate", (int fd, off_t size), fd, size)
BY_FD(ftruncate64, "ftruncate", (int fd, off64_t size), fd, size)
BY_FD(fallocate, "fallocate", (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
BY_FD(fallocate64, "fallocate", (int fd, int mode, off64_t at, off64_t size), fd, mode, at, size)
BY_FD(flock, "flock", (int fd, int operation), fd, operation)
BY_FD(fchmod, "fchmod", (int fd, mode_t mode), fd, mode)
BY_FD(fchown, "fchown", (int fd, uid_t user, gid_t group), fd, user, group)
BY_FD(futimens, "futimens", (int fd, const struct timespec times[2]), fd, times)

#define POSIX_FALLOCATE(name, offset_type)                          \
    int name(int fd, offset_type at, offset_type size) {            \
        REAL(name);                                                 \
        int error = harm_fd("fallocate", fd, "", 0);                \
        return error ? error : real(fd, at, size);                  \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

#define BY_PATH(name, call, at, path, leading, ...)                               \
    int name leading {                                                            \
        REAL(name);                                                               \
        return refused(harm_at(call, at, path, "")) ? -1 : real(__VA_ARGS__);     \
    }
BY_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
BY_PATH(mkdirat, "mkdir", at, path, (int at, const char *path, mode_t mode), at, path, mode)
BY_PATH(rmdir, "rmdir", AT_FDCWD, path, (const char *path), path)
BY_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
BY_PATH(remove, "unlink", AT_FDCWD, path, (const char *path), path)
BY_PATH(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", at, path, (int at, const char *path, int flags), at, path, flags)
BY_PATH(truncate, "truncate", AT_FDCWD, path, (const char *path, off_t size), path, size)
BY_PATH(truncate64, "truncate", AT_FDCWD, path, (const char *path, off64_t size), path, size)
BY_PATH(chmod, "chmod", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
BY_PATH(utimensat, "utimens", at, path, (int at, const char *path, const struct timespec times[2], int flags), at, path, times, flags)
BY_PATH(symlink, "symlink", AT_FDCWD, path, (const char *target, const char *path), target, path)
BY_PATH(symlinkat, "symlink", at, path, (const char *target, int at, const char *path), target, at, path)

static int harm_two(const char *call, int from_at, const char *from, int to_at, const char *to) {
    if (armed.mode == OFF || inside_shim) return 0;
    char target[PATH_MAX];
    path_at(to_at, to, target);
    return harm_at(call, from_at, from, target);
}

#define BY_TWO(name, call, from_at, from, to_at, to, leading, ...)                                      \
    int name leading {                                                                                  \
        REAL(name);                                                                                     \
        return refused(harm_two(call, from_at, from, to_at, to)) ? -1 : real(__VA_ARGS__);              \
    }
BY_TWO(rename, "rename", AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to), from, to)
BY_TWO(renameat, "rename", a, from, b, to, (int a, const char *from, int b, const char *to), a, from, b, to)
BY_TWO(renameat2, flags & RENAME_EXCHANGE ? "exchange" : "rename", a, from, b, to,
       (int a, const char *from, int b, const char *to, unsigned flags), a, from, b, to,
       flags & RENAME_EXCHANGE && getenv("SHIM_NO_EXCHANGE") ? ~0u : flags) /* EINVAL */
BY_TWO(link, "link", AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to), from, to)
BY_TWO(linkat, "link", a, from, b, to, (int a, const char *from, int b, const char *to, int flags), a, from, b, to, flags)

/* ---- looking: only a hang stops it ------------------------------------------------------------------------------ */

#define LOOK(type, name, at, path, leading, ...) \
    type name leading {                          \
        REAL(name);                              \
        look(at, path);                          \
        return real(__VA_ARGS__);                \
    }
LOOK(int, stat, AT_FDCWD, path, (const char *restrict path, struct stat *restrict found), path, found)
LOOK(int, stat64, AT_FDCWD, path, (const char *restrict path, struct stat64 *restrict found), path, found)
LOOK(int, lstat, AT_FDCWD, path, (const char *restrict path, struct stat *restrict found), path, found)
LOOK(int, lstat64, AT_FDCWD, path, (const char *restrict path, struct stat64 *restrict found), path, found)
LOOK(int, fstatat, at, path, (int at, const char *restrict path, struct stat *restrict found, int flags), at, path, found, flags)
LOOK(int, fstatat64, at, path, (int at, const char *restrict path, struct stat64 *restrict found, int flags), at, path, found, flags)
LOOK(int, access, AT_FDCWD, path, (const char *path, int mode), path, mode)
LOOK(DIR *, opendir, AT_FDCWD, path, (const char *path), path)

/* ---- io_uring ----------------------------------------------------------------------------------------------------- */

/* A ring's file descriptor, its parameters as the kernel filled them in, and where its two areas are mapped. */
static struct ring {
    int fd;
    struct io_uring_params *params;
    uint8_t *words, *entries;
} rings[64];

static struct ring *ring_of(int fd) {
    for (int i = 0; i < 64; i++)
        if (rings[i].params && rings[i].fd == fd) return &rings[i];
    return NULL;
}

static void note_mapping(void *found, int fd, off_t offset) {
    struct ring *ring = fd < 0 || found == MAP_FAILED ? NULL : ring_of(fd);
    if (ring && offset == IORING_OFF_SQ_RING) ring->words = found;
    if (ring && offset == (off_t)IORING_OFF_SQES) ring->entries = found;
}

#define MMAP(name, offset_type)                                                                        \
    void *name(void *where, size_t size, int protection, int flags, int fd, offset_type offset) {      \
        REAL(name);                                                                                    \
        void *found = real(where, size, protection, flags, fd, offset);                                \
        note_mapping(found, fd, offset);                                                               \
        return found;                                                                                  \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

/* Our native engine submits one entry at a time, the last one before the tail. */
static int harm_submission(int fd) {
    struct ring *ring = ring_of(fd);
    if (!ring || !ring->words || !ring->entries) return 0;
    uint32_t tail = *(uint32_t *)(ring->words + ring->params->sq_off.tail) - 1;
    uint32_t mask = *(uint32_t *)(ring->words + ring->params->sq_off.ring_mask);
    struct io_uring_sqe *entry = (struct io_uring_sqe *)ring->entries + (tail & mask);
    if (entry->opcode != IORING_OP_WRITE) return 0;
    char range[64];
    snprintf(range, sizeof range, "%llu\t%u", (unsigned long long)entry->off, entry->len);
    int error = harm_fd("uring", entry->fd, range, 1);
    if (error == HALF) entry->len = entry->len / 2 / 4096 * 4096;
    return error;
}

long syscall(long number, ...) {
    REAL(syscall);
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_uring_setup && getenv("SHIM_NO_IO_URING")) {
        errno = ENOSYS;
        return -1;
    }
    if (number == SYS_io_uring_enter && a[1] > 0) {
        int error = harm_submission((int)a[0]);
        if (error == HALF) { /* submitted and completed by half, then the end */
            if (real(number, a[0], a[1], 1L, (long)IORING_ENTER_GETEVENTS, 0L, 0L) >= 0) raise(SIGKILL);
        } else if (error) { /* the engine then writes by itself, and that fails */
            owed = error;
            return refused(EAGAIN) ? -1 : 0;
        }
    }
    long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_io_uring_setup && result >= 0)
        for (int i = 0; i < 64; i++)
            if (!rings[i].params || rings[i].fd == (int)result) {
                rings[i] = (struct ring){(int)result, (struct io_uring_params *)a[1], NULL, NULL};
                break;
            }
    return result;
}
