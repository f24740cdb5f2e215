/* Logs a program's writes to a database's files and its syncs, in order, so that crash.py knows what a disk may
 * contain after a power cut. For tests only:
 *
 *     cc -shared -fPIC -o unsynced.so unsynced.c
 *     UNSYNCED_DATABASE=/absolute/path UNSYNCED_LOG=/other/path LD_PRELOAD=./unsynced.so program
 *
 * SQLite writes in no other way; if it did, crash.py would find that the log and the files differ. Every call is passed
 * on. A lock is held during a call and its record, so that the log has the real order.
 * UNSYNCED_LIE names a file by its ending, such as -wal, whose syncs do nothing, are not logged, and report success.
 * While the file UNSYNCED_FAIL exists, syncs fail.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The function that this file replaces. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Another name of a function. On a 64-bit system, the ones with 64 are no other functions. */
#define ALSO(other, name) extern __typeof__(name) other __attribute__((alias(#name), copy(name)))

enum { CREATE = 'c', WRITE = 'w', TRUNCATE = 't', SYNC = 's', SYNC_FOLDER = 'd' };

/* As read by crash.py. The written bytes follow. The time is the end of the call, in nanoseconds of the monotonic
 * clock. */
struct record {
    char operation;
    char ending[15];
    uint64_t time;
    uint64_t offset;
    uint64_t length;
};

/* The database's folder, which is synced because of the file names in it. */
static const char FOLDER[] = "/";

/* The endings of the database's files. Without -shm, which is created again at every start. */
static const char *const ENDINGS[] = {"", "-wal", "-journal"};

/* The ending, or FOLDER, of each open file; null for other files. */
enum { FILES = 1 << 16 };
static const char *watched[FILES];

static const char *database;
static const char *lie;
static const char *failure;
static int log_file = -1;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *what) {
    perror(what);
    abort();
}

__attribute__((constructor)) static void start(void) {
    const char *log = getenv("UNSYNCED_LOG");
    database = getenv("UNSYNCED_DATABASE");
    lie = getenv("UNSYNCED_LIE");
    failure = getenv("UNSYNCED_FAIL");
    if (!log || !database) {
        fputs("unsynced.c needs UNSYNCED_LOG and UNSYNCED_DATABASE\n", stderr);
        abort();
    }
    log_file = REAL(open)(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log_file < 0) fail(log);
}

static void record(char operation, const char *ending, uint64_t offset, const void *data, uint64_t length) {
    int error = errno;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t time = (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    struct record head = {.operation = operation, .time = time, .offset = offset, .length = length};
    strcpy(head.ending, ending);
    struct iovec parts[] = {{&head, sizeof head}, {(void *)data, data ? length : 0}};
    ssize_t size = parts[0].iov_len + parts[1].iov_len;
    if (writev(log_file, parts, 2) != size) fail("the log of unsynced.c");
    errno = error;
}

static const char *ending_of(const char *path) {
    size_t length = strlen(database);
    if (strncmp(path, database, length) != 0) return NULL;
    for (size_t i = 0; i < sizeof ENDINGS / sizeof *ENDINGS; i++)
        if (strcmp(path + length, ENDINGS[i]) == 0) return ENDINGS[i];
    return NULL;
}

static int is_folder(const char *path) {
    size_t length = strrchr(database, '/') - database;
    return strncmp(path, database, length) == 0 && path[length] == 0;
}

static const char *watched_as(int file) { return file >= 0 && file < FILES ? watched[file] : NULL; }

static void watch(int file, const char *as) {
    if (file >= FILES) fail("too many open files for unsynced.c");
    if (file >= 0) watched[file] = as;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    const char *ending = ending_of(path);
    pthread_mutex_lock(&order);
    int is_new = ending && (flags & O_CREAT) && access(path, F_OK) != 0;
    int file = REAL(open)(path, flags, mode);
    if (is_new && file >= 0) record(CREATE, ending, 0, NULL, 0);
    watch(file, ending ? ending : is_folder(path) ? FOLDER : NULL);
    pthread_mutex_unlock(&order);
    return file;
}
ALSO(open64, open);

int close(int file) {
    if (watched_as(file)) watch(file, NULL);
    return REAL(close)(file);
}

ssize_t pwrite(int file, const void *data, size_t length, off_t offset) {
    const char *as = watched_as(file);
    if (!as) return REAL(pwrite)(file, data, length, offset);
    pthread_mutex_lock(&order);
    ssize_t written = REAL(pwrite)(file, data, length, offset);
    if (written > 0) record(WRITE, as, offset, data, written);
    pthread_mutex_unlock(&order);
    return written;
}
ALSO(pwrite64, pwrite);

int ftruncate(int file, off_t length) {
    const char *as = watched_as(file);
    if (!as) return REAL(ftruncate)(file, length);
    pthread_mutex_lock(&order);
    int result = REAL(ftruncate)(file, length);
    if (result == 0) record(TRUNCATE, as, length, NULL, 0);
    pthread_mutex_unlock(&order);
    return result;
}
ALSO(ftruncate64, ftruncate);

static int watched_sync(__typeof__(&fsync) real, int file) {
    const char *as = watched_as(file);
    if (!as) return real(file);
    if (lie && strcmp(as, lie) == 0) return 0;
    if (failure && access(failure, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    pthread_mutex_lock(&order);
    int result = real(file);
    if (result == 0) record(as == FOLDER ? SYNC_FOLDER : SYNC, as, 0, NULL, 0);
    pthread_mutex_unlock(&order);
    return result;
}

int fsync(int file) { return watched_sync(REAL(fsync), file); }

int fdatasync(int file) { return watched_sync(REAL(fdatasync), file); }
