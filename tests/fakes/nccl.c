/* What artd calls of libnccl, for tests: rank 0's broadcasts go to a descriptor, each behind its size, its messages through a pipe
 * to rank 1, and any step can go wrong.
 * Ways: 0 fine, 1 never done, 2 hangs inside the call, 3 fails at once, 4 fails on its way. An abort ends all of them. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, UNHANDLED, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS };
enum { FINE, NEVER, HANGS, FAILS, FAILS_LATER };
enum { INIT, REDUCE, BROADCAST, SEND, RECV, STEPS };
typedef struct { char bytes[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;
typedef struct { int state, aborted, rank; } communicator;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static int ways[STEPS], skip[STEPS], out = -1, aborts, pipe_out = -1, pipe_in = -1;

/* Step `step` goes `way` after it went well `well` times; broadcasts are written to `fd`. */
void fake_script(int step, int way, int well, int fd) { ways[step] = way; skip[step] = well; out = fd; }
/* Messages are written to `writing` and read from `reading` (-1: nowhere). */
void fake_pipe(int reading, int writing) { pipe_in = reading; pipe_out = writing; }
int fake_aborts(void) { return aborts; }

static int go(communicator *one, int step) {
    int code = SUCCESS;
    pthread_mutex_lock(&lock);
    if (skip[step]-- > 0 || ways[step] == FINE) one->state = SUCCESS;
    else if (ways[step] == NEVER) one->state = code = IN_PROGRESS;
    else if (ways[step] == FAILS) one->state = code = SYSTEM;
    else if (ways[step] == FAILS_LATER) { one->state = REMOTE; code = IN_PROGRESS; }
    else {
        while (!one->aborted) pthread_cond_wait(&change, &lock);
        code = INTERNAL;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

const char *ncclGetErrorString(int code) { return code == SYSTEM ? "unhandled system error" : code == REMOTE ? "remote process exited" : "fake"; }
int ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }
int ncclGetUniqueId(unique_id *id) { for (int i = 0; i < 128; i++) id->bytes[i] = (char)(i + 1); return SUCCESS; }

int ncclCommInitRankConfig(void **made, int ranks, unique_id id, int rank, config *how) {
    if (how->magic != 0xcafebeef || how->blocking || ranks != 2 || (rank & ~1) || id.bytes[127] != (char)128) return ARGUMENT;
    communicator *one = calloc(1, sizeof *one);
    one->rank = rank;
    *made = one;
    return go(one, INIT);
}

int ncclCommGetAsyncError(communicator *one, int *state) { *state = one->state; return SUCCESS; }

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, communicator *one, void *stream) {
    (void)stream;
    return from == to && count == 1 && type == 7 && op == 0 ? go(one, REDUCE) : ARGUMENT;
}

static int put(int to, const void *from, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t n = write(to, (const char *)from + done, count - done);
        if (n < 0 && errno != EINTR) return 0;
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, communicator *one, void *stream) {
    (void)stream;
    if (from != to || type != 1 || root != 0) return ARGUMENT;
    int code = go(one, BROADCAST);
    return code != SUCCESS || out < 0 || (put(out, &count, sizeof count) && put(out, from, count)) ? code : SYSTEM;
}

static int get(void *to, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t n = read(pipe_in, (char *)to + done, count - done);
        if (n == 0 || (n < 0 && errno != EINTR)) return 0;
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

int ncclSend(const void *from, size_t count, int type, int peer, communicator *one, void *stream) {
    (void)stream;
    if (type != 1 || one->rank != 0 || peer != 1) return ARGUMENT;
    int code = go(one, SEND);
    return code != SUCCESS || pipe_out < 0 || put(pipe_out, from, count) ? code : SYSTEM;
}

int ncclRecv(void *to, size_t count, int type, int peer, communicator *one, void *stream) {
    (void)stream;
    if (type != 1 || one->rank != 1 || peer != 0) return ARGUMENT;
    int code = go(one, RECV);
    return code != SUCCESS || pipe_in < 0 || get(to, count) ? code : SYSTEM;
}

int ncclCommAbort(communicator *one) {
    pthread_mutex_lock(&lock);
    aborts++;
    one->aborted = 1;
    one->state = INTERNAL;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
