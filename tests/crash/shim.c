/* LD_PRELOAD shim: records every change that a process makes to files below one folder, or lets the N-th one fail.

   Settings, from the environment, so that the daemon's children have them too:
     ARTD_SHIM_ROOT   only paths below this folder (absolute, without links) are looked at
     ARTD_SHIM_SKIP   colon-separated parts of paths that are not
     ARTD_SHIM_SHARED a file that all processes map: the count of operations, the lock, and what was failed
     ARTD_SHIM_LOG    records are appended to this file; unset: nothing is recorded
     ARTD_SHIM_FAIL   OP:N:ERRNO:once|on:KIND:PART, see shim_arm; unset: nothing fails. OP exec: the process stops instead

   Invariants: an operation and its record happen under one lock across all processes, so the order of the log is the order of
   the operations and `sequence` counts what has happened; only what succeeded is recorded; a call that changes files in a way
   that is not modelled (copy_file_range, splice, symlink) is recorded as UNKNOWN, which the replayer refuses. SQLite's
   -shm is mapped, never durable, and is to be skipped. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
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

#define EXPORT __attribute__((visibility("default")))
#define REAL(name) ((__typeof__(&name))real(#name))
#define READY 0x61727464u

/* Shared by every process; tests/crash/shim.py reads all but the fourth word, which it writes. */
struct shared {
    uint64_t sequence; /* operations done */
    uint64_t matched;  /* operations that the armed failure could have hit */
    uint64_t failed;   /* how many did fail */
    uint64_t at;       /* which is to fail, where the settings say 0 */
    char victim[256];  /* the path of the last that failed */
    uint32_t ready;
    pthread_mutex_t lock;
};

enum { CREATE = 1, MKDIR, WRITE, TRUNCATE, RENAME, UNLINK, RMDIR, LINK, FSYNC, UNKNOWN, LOST };

struct header { /* little-endian; paths and data follow */
    uint64_t sequence, inode;
    int64_t offset; /* of a write, or the size after a truncate */
    uint32_t op, pid, path, path2, data, pad;
};

static struct {
    char root[PATH_MAX], skip[512], log[PATH_MAX];
    struct shared *shared;
    char op[16], part[256];
    uint64_t at;
    int armed, error, on;
} set;

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL) abort();
    return found;
}

/* What fails from now on, in this process and those that it forks; "" for nothing. OP: write, truncate, fsync, rename, unlink,
   create, any of these, or exec; N counts from 1, 0 is left to the driver; KIND: daemon, worker or any ($ARTD_WORKER tells them apart); PART: of the path, "" for any. */
EXPORT void shim_arm(const char *spec) {
    char kind[16] = "", mode[8] = "";
    unsigned long at = 0;
    set.armed = 0;
    set.part[0] = 0;
    if (sscanf(spec, "%15[^:]:%lu:%d:%7[^:]:%15[^:]:%255s", set.op, &at, &set.error, mode, kind, set.part) < 5) return;
    const char *mine = getenv("ARTD_WORKER") ? "worker" : "daemon";
    if (strcmp(kind, "any") && strcmp(kind, mine)) return;
    set.on = !strcmp(mode, "on");
    set.at = at;
    set.armed = 1;
}

/* Count matching operations from nothing again, for all processes. */
EXPORT void shim_reset(void) {
    set.shared->matched = set.shared->failed = 0;
}

static void copy(char *to, size_t size, const char *name) {
    const char *value = getenv(name);
    snprintf(to, size, "%s", value ? value : "");
}

__attribute__((constructor)) static void start(void) {
    char path[PATH_MAX];
    copy(path, sizeof path, "ARTD_SHIM_SHARED");
    if (!*path) return;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) abort();
    syscall(SYS_flock, fd, LOCK_EX);
    struct shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) abort();
    if (s->ready != READY) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&s->lock, &attributes);
        s->ready = READY;
    }
    syscall(SYS_flock, fd, LOCK_UN); /* the mapping would keep it */
    syscall(SYS_close, fd);
    copy(set.root, sizeof set.root, "ARTD_SHIM_ROOT");
    copy(set.skip, sizeof set.skip, "ARTD_SHIM_SKIP");
    copy(set.log, sizeof set.log, "ARTD_SHIM_LOG");
    char spec[512];
    copy(spec, sizeof spec, "ARTD_SHIM_FAIL");
    shim_arm(spec);
    set.shared = s;
}

/* ---- which paths ------------------------------------------------------------------------------------------------- */

static int wanted(const char *path) {
    size_t length = strlen(set.root);
    if (strncmp(path, set.root, length) || (path[length] != '/' && path[length] != 0)) return 0;
    char parts[sizeof set.skip], *next = parts, *part;
    memcpy(parts, set.skip, sizeof parts);
    while ((part = strsep(&next, ":")))
        if (*part && strstr(path, part)) return 0;
    return 1;
}

static int of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
    return n > 0;
}

/* The absolute form of a path; whether it is looked at. */
static int at(int folder, const char *path, char *out) {
    if (!set.shared || !path) return 0;
    if (*path == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX];
        if (folder == AT_FDCWD ? syscall(SYS_getcwd, base, sizeof base) < 0 : !of_fd(folder, base)) return 0;
        snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
    }
    return wanted(out);
}

/* The same for an open file; regular files only, or folders too. */
static int opened(int fd, char *out, struct stat *info, int folders) {
    if (!set.shared || fstat(fd, info) || !(S_ISREG(info->st_mode) || (folders && S_ISDIR(info->st_mode)))) return 0;
    return of_fd(fd, out) && wanted(out);
}

/* ---- one operation ----------------------------------------------------------------------------------------------- */

/* Take the lock; true, with errno set and the lock given back, when this operation is to fail. */
static int begin(const char *op, const char *path) {
    struct shared *s = set.shared;
    if (pthread_mutex_lock(&s->lock) == EOWNERDEAD) pthread_mutex_consistent(&s->lock);
    if (!set.armed || (strcmp(set.op, "any") && strcmp(set.op, op)) || !strstr(path, set.part)) return 0;
    s->matched++;
    uint64_t at = set.at ? set.at : s->at;
    if (!at || (set.on ? s->matched < at : s->matched != at)) return 0;
    s->failed++;
    snprintf(s->victim, sizeof s->victim, "%s", path);
    pthread_mutex_unlock(&s->lock);
    errno = set.error;
    return 1;
}

/* Record the operation if it succeeded, and give the lock back. */
static long end(long result, int op, uint64_t inode, int64_t offset, const char *path, const char *path2,
                const struct iovec *data, int parts) {
    int saved = errno;
    if (result >= 0) set.shared->sequence++;
    if (result >= 0 && *set.log) {
        struct iovec all[2 + 1 + 1024] = {{0}};
        size_t left = op == WRITE ? (size_t)result : 0;
        struct header h = {set.shared->sequence, inode, offset, op, getpid(), strlen(path), strlen(path2), left, 0};
        size_t total = sizeof h + h.path + h.path2 + left;
        all[0] = (struct iovec){&h, sizeof h};
        all[1] = (struct iovec){(void *)path, h.path};
        all[2] = (struct iovec){(void *)path2, h.path2};
        for (int i = 0; i < parts && i < 1024; i++) {
            size_t n = data[i].iov_len < left ? data[i].iov_len : left;
            all[3 + i] = (struct iovec){data[i].iov_base, n};
            left -= n;
        }
        int fd = syscall(SYS_openat, AT_FDCWD, set.log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (syscall(SYS_writev, fd, all, 3 + (parts < 1024 ? parts : 1024)) != (ssize_t)total) abort();
        syscall(SYS_close, fd);
    }
    pthread_mutex_unlock(&set.shared->lock);
    errno = saved;
    return result;
}

static uint64_t inode_of(const char *path) {
    struct stat info;
    return lstat(path, &info) ? 0 : info.st_ino;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static int open_any(int folder, const char *path, int flags, mode_t mode) {
    __typeof__(&openat) go = REAL(openat64);
    char full[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !at(folder, path, full)) return go(folder, path, flags, mode);
    struct stat info;
    int existed = !stat(full, &info);
    if (begin("create", full)) return -1;
    int fd = go(folder, path, flags, mode);
    int op = existed ? TRUNCATE : CREATE;
    if (fd >= 0 && existed && !((flags & O_TRUNC) && info.st_size)) { /* changed nothing */
        pthread_mutex_unlock(&set.shared->lock);
        return fd;
    }
    return end(fd, op, fd < 0 ? 0 : inode_of(full), 0, full, "", NULL, 0);
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, last); mode = va_arg(more, int); va_end(more); }
EXPORT int open(const char *path, int flags, ...) { MODE(flags, flags) return open_any(AT_FDCWD, path, flags, mode); }
EXPORT int open64(const char *path, int flags, ...) { MODE(flags, flags) return open_any(AT_FDCWD, path, flags, mode); }
EXPORT int openat(int folder, const char *path, int flags, ...) { MODE(flags, flags) return open_any(folder, path, flags, mode); }
EXPORT int openat64(int folder, const char *path, int flags, ...) { MODE(flags, flags) return open_any(folder, path, flags, mode); }
EXPORT int creat(const char *path, mode_t mode) { return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

EXPORT ssize_t writev(int fd, const struct iovec *data, int parts) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 0)) return REAL(writev)(fd, data, parts);
    if (begin("write", path)) return -1;
    ssize_t n = REAL(writev)(fd, data, parts);
    int64_t after = lseek(fd, 0, SEEK_CUR);
    return end(n, WRITE, info.st_ino, after - n, path, "", data, parts);
}
EXPORT ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 0)) return REAL(write)(fd, data, size);
    if (begin("write", path)) return -1;
    ssize_t n = REAL(write)(fd, data, size);
    int64_t after = lseek(fd, 0, SEEK_CUR);
    return end(n, WRITE, info.st_ino, after - n, path, "", &(struct iovec){(void *)data, size}, 1);
}
EXPORT ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 0)) return REAL(pwrite64)(fd, data, size, offset);
    if (begin("write", path)) return -1;
    ssize_t n = REAL(pwrite64)(fd, data, size, offset);
    return end(n, WRITE, info.st_ino, offset, path, "", &(struct iovec){(void *)data, size}, 1);
}
EXPORT ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

/* What is sent is read again, for the record: shutil.copyfile. */
EXPORT ssize_t sendfile64(int out, int in, off_t *offset, size_t size) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(out, path, &info, 0)) return REAL(sendfile64)(out, in, offset, size);
    off_t from = offset ? *offset : lseek(in, 0, SEEK_CUR);
    if (begin("write", path)) return -1;
    ssize_t n = REAL(sendfile64)(out, in, offset, size);
    void *data = malloc(n > 0 ? n : 1);
    if (n > 0 && pread(in, data, n, from) != n) abort();
    int64_t after = lseek(out, 0, SEEK_CUR);
    n = end(n, WRITE, info.st_ino, after - n, path, "", &(struct iovec){data, n > 0 ? n : 0}, 1);
    free(data);
    return n;
}
EXPORT ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return sendfile64(out, in, offset, size); }

EXPORT int ftruncate64(int fd, off_t size) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 0)) return REAL(ftruncate64)(fd, size);
    if (begin("truncate", path)) return -1;
    return end(REAL(ftruncate64)(fd, size), TRUNCATE, info.st_ino, size, path, "", NULL, 0);
}
EXPORT int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
EXPORT int truncate64(const char *path, off_t size) {
    char full[PATH_MAX];
    if (!at(AT_FDCWD, path, full)) return REAL(truncate64)(path, size);
    if (begin("truncate", full)) return -1;
    return end(REAL(truncate64)(path, size), TRUNCATE, inode_of(full), size, full, "", NULL, 0);
}
EXPORT int truncate(const char *path, off_t size) { return truncate64(path, size); }

/* Room is made as by a truncate that only makes longer. The error is what it returns. */
EXPORT int posix_fallocate64(int fd, off_t offset, off_t size) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 0)) return REAL(posix_fallocate64)(fd, offset, size);
    if (begin("truncate", path)) return set.error;
    int error = REAL(posix_fallocate64)(fd, offset, size);
    off_t length = offset + size > info.st_size ? offset + size : info.st_size;
    end(error ? -1 : 0, TRUNCATE, info.st_ino, length, path, "", NULL, 0);
    return error;
}
EXPORT int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

static int sync_any(const char *name, int fd) {
    int (*go)(int) = (int (*)(int))real(name);
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 1)) return go(fd);
    if (begin("fsync", path)) {
        int error = errno;
        if (pthread_mutex_lock(&set.shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&set.shared->lock);
        end(0, LOST, info.st_ino, 0, path, "", NULL, 0);
        errno = error;
        return -1;
    }
    return end(go(fd), FSYNC, info.st_ino, 0, path, "", NULL, 0);
}
EXPORT int fsync(int fd) { return sync_any("fsync", fd); }
EXPORT int fdatasync(int fd) { return sync_any("fdatasync", fd); }

EXPORT int renameat(int folder, const char *path, int folder2, const char *path2) {
    char a[PATH_MAX], b[PATH_MAX];
    int first = at(folder, path, a), second = at(folder2, path2, b);
    if (!first && !second) return REAL(renameat)(folder, path, folder2, path2);
    if (begin("rename", b)) return -1;
    uint64_t inode = inode_of(a);
    return end(REAL(renameat)(folder, path, folder2, path2), RENAME, inode, 0, a, b, NULL, 0);
}
EXPORT int rename(const char *path, const char *path2) { return renameat(AT_FDCWD, path, AT_FDCWD, path2); }

EXPORT int linkat(int folder, const char *path, int folder2, const char *path2, int flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int first = at(folder, path, a), second = at(folder2, path2, b);
    if (!first && !second) return REAL(linkat)(folder, path, folder2, path2, flags);
    if (begin("rename", b)) return -1;
    return end(REAL(linkat)(folder, path, folder2, path2, flags), LINK, inode_of(a), 0, a, b, NULL, 0);
}
EXPORT int link(const char *path, const char *path2) { return linkat(AT_FDCWD, path, AT_FDCWD, path2, 0); }

EXPORT int unlinkat(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    if (!at(folder, path, full)) return REAL(unlinkat)(folder, path, flags);
    if (begin("unlink", full)) return -1;
    uint64_t inode = inode_of(full);
    int op = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    return end(REAL(unlinkat)(folder, path, flags), op, inode, 0, full, "", NULL, 0);
}
EXPORT int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
EXPORT int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

EXPORT int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!at(folder, path, full)) return REAL(mkdirat)(folder, path, mode);
    if (begin("create", full)) return -1;
    int result = REAL(mkdirat)(folder, path, mode);
    return end(result, MKDIR, result ? 0 : inode_of(full), 0, full, "", NULL, 0);
}
EXPORT int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* ---- exec --------------------------------------------------------------------------------------------------------- */

/* An exec that is to fail stops the process before it (SIGSTOP): forked, and nothing else yet. Its path is `^ARGV0|ARGV1|...`.
   Stack and system calls only: the child of a vfork has its parent's memory. */
static void hold(char *const argv[]) {
    if (!set.shared || !set.armed || strcmp(set.op, "exec")) return;
    char line[4096] = "^";
    for (size_t i = 0, used = 1; argv[i] && used < sizeof line; i++)
        used += snprintf(line + used, sizeof line - used, i ? "|%s" : "%s", argv[i]);
    if (begin("exec", line)) syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP);
    else pthread_mutex_unlock(&set.shared->lock);
}
EXPORT int execve(const char *path, char *const argv[], char *const environment[]) {
    hold(argv);
    return REAL(execve)(path, argv, environment);
}
EXPORT int execv(const char *path, char *const argv[]) {
    hold(argv);
    return REAL(execv)(path, argv);
}

/* ---- what is not modelled ------------------------------------------------------------------------------------------ */

static void unknown(int fd, const char *name) {
    char path[PATH_MAX];
    struct stat info;
    if (!opened(fd, path, &info, 0)) return;
    if (begin("unknown", path)) return;
    end(0, UNKNOWN, info.st_ino, 0, path, name, NULL, 0);
}
EXPORT ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t size, unsigned flags) {
    unknown(out, "copy_file_range");
    return REAL(copy_file_range)(in, from, out, to, size, flags);
}
EXPORT ssize_t splice(int in, off_t *from, int out, off_t *to, size_t size, unsigned flags) {
    unknown(out, "splice");
    return REAL(splice)(in, from, out, to, size, flags);
}
EXPORT ssize_t pwritev64v2(int fd, const struct iovec *data, int parts, off_t offset, int flags) {
    unknown(fd, "pwritev2");
    return REAL(pwritev64v2)(fd, data, parts, offset, flags);
}
