/* Logs what a program does to the files below a directory, in order, for tests/store/power.py.

   LD_PRELOAD=power.so POWER_BELOW=/absolute/directory POWER_LOG=/file program

   A record follows each call that succeeded: struct record, the path, the data. SQLite's -shm is left out: it is
   mapped, and rebuilt from the log of its database. Unlike libc, no call here is a cancellation point. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define HIGH 900 /* above the descriptors of the program */

struct record {
    char kind;
    uint32_t path_bytes, data_bytes;
    uint64_t offset;
} __attribute__((packed));

static int log_descriptor = -1;
static const char *below;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("POWER_LOG");
    below = getenv("POWER_BELOW");
    if (!path || !below)
        return;
    int low = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    log_descriptor = fcntl(low, F_DUPFD_CLOEXEC, HIGH);
    if (log_descriptor < 0)
        abort();
    close(low);
}

static int ends(const char *text, const char *ending) {
    size_t length = strlen(text), own = strlen(ending);
    return length >= own && !strcmp(text + length - own, ending);
}

static int watched(const char *path) {
    size_t length = below ? strlen(below) : 0;
    return log_descriptor >= 0 && !strncmp(path, below, length) && (path[length] == '/' || !path[length]) &&
           !ends(path, "-shm") && !ends(path, " (deleted)");
}

static void note(char kind, const char *path, uint64_t offset, const void *data, size_t size) {
    int error = errno;
    struct record record = {kind, strlen(path), size, offset};
    struct iovec parts[] = {{&record, sizeof record}, {(void *)path, strlen(path)}, {(void *)data, size}};
    if (syscall(SYS_writev, log_descriptor, parts, 3) != (long)(sizeof record + strlen(path) + size))
        abort(); /* an incomplete log proves nothing */
    errno = error;
}

/* The path of an open file that is watched, else NULL. */
static const char *path_of(int descriptor, char *path) {
    char link[32] = "/proc/self/fd/", digits[12], *at = digits + sizeof digits - 1;
    int error = errno, rest = descriptor;
    if (log_descriptor < 0 || descriptor < 0)
        return NULL;
    for (*at = 0; rest || !*at; rest /= 10)
        *--at = '0' + rest % 10;
    strcat(link, at);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = error;
    if (length < 0)
        return NULL;
    path[length] = 0;
    return watched(path) ? path : NULL;
}

static void note_of(char kind, int descriptor, uint64_t offset, const void *data, size_t size) {
    char buffer[PATH_MAX];
    const char *path = path_of(descriptor, buffer);
    if (path)
        note(kind, path, offset, data, size);
}

int openat(int directory, const char *path, int flags, ...) {
    mode_t mode = 0;
    if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    int error = errno;
    int made = (flags & O_CREAT) && faccessat(directory, path, F_OK, 0) < 0;
    errno = error;
    int descriptor = syscall(SYS_openat, directory, path, flags, mode);
    if (descriptor >= 0 && made)
        note_of('c', descriptor, 0, NULL, 0);
    else if (descriptor >= 0 && (flags & O_TRUNC))
        note_of('t', descriptor, 0, NULL, 0);
    return descriptor;
}

#define OPEN(name)                                    \
    int name(const char *path, int flags, ...) {      \
        va_list rest;                                 \
        va_start(rest, flags);                        \
        mode_t mode = va_arg(rest, mode_t);           \
        va_end(rest);                                 \
        return openat(AT_FDCWD, path, flags, mode);   \
    }
OPEN(open)
OPEN(open64)
int openat64(int, const char *, int, ...) __attribute__((alias("openat")));

static ssize_t written(int descriptor, ssize_t size, const void *data) {
    if (size > 0)
        note_of('w', descriptor, lseek(descriptor, 0, SEEK_CUR) - size, data, size);
    return size;
}

ssize_t write(int descriptor, const void *data, size_t size) {
    return written(descriptor, syscall(SYS_write, descriptor, data, size), data);
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    ssize_t done = syscall(SYS_pwrite64, descriptor, data, size, offset);
    if (done > 0)
        note_of('w', descriptor, offset, data, done);
    return done;
}
ssize_t pwrite(int, const void *, size_t, off_t) __attribute__((alias("pwrite64")));

int ftruncate64(int descriptor, off64_t size) {
    int failed = syscall(SYS_ftruncate, descriptor, size);
    if (!failed)
        note_of('t', descriptor, size, NULL, 0);
    return failed;
}
int ftruncate(int, off_t) __attribute__((alias("ftruncate64")));

int fdatasync(int descriptor) {
    int failed = syscall(SYS_fdatasync, descriptor);
    if (!failed)
        note_of('s', descriptor, 0, NULL, 0);
    return failed;
}

int fsync(int descriptor) {
    int failed = syscall(SYS_fsync, descriptor);
    if (!failed)
        note_of('s', descriptor, 0, NULL, 0);
    return failed;
}

int rename(const char *from, const char *to) {
    int failed = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (!failed && watched(from))
        note('r', from, 0, to, strlen(to));
    return failed;
}

int unlink(const char *path) {
    int failed = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    if (!failed && watched(path))
        note('u', path, 0, NULL, 0);
    return failed;
}

int mkdir(const char *path, mode_t mode) {
    int failed = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (!failed && watched(path))
        note('d', path, 0, NULL, 0);
    return failed;
}
