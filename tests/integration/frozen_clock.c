/* Sets the clock of a program to a time, in Unix seconds, where it stays until another one is set. For tests:
 *
 *     cc -shared -fPIC -o frozen_clock.so frozen_clock.c
 *     ln -s 1900000000 now
 *     FROZEN_CLOCK=now LD_PRELOAD=./frozen_clock.so program
 *
 * The time is the target of a link: one call reads it, and a rename replaces it. Durations and deadlines use the monotonic
 * clock, which goes on.
 */

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    const char *path = getenv("FROZEN_CLOCK");
    char seconds[21] = "";
    if (clock != CLOCK_REALTIME || !path || readlink(path, seconds, sizeof seconds - 1) < 1)
        return (int)syscall(SYS_clock_gettime, clock, time);
    time->tv_sec = atoll(seconds);
    time->tv_nsec = 0;
    return 0;
}

/* SQLite's clock. */
int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}
