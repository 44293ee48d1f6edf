// SPDX-License-Identifier: Apache-2.0
//
// Stands between a program and libaio (LD_PRELOAD) and does what kernels and devices may do and rarely do: whoever uses
// libaio, TenCache's native op or DeepSpeed's aio op, meets the same fault. AIO_FAULT is a rule such as
// "kind=eio,op=read,match=/weights,every=3,times=1"; or AIO_FAULT_FILE names a file that holds the rule, and may be
// written, changed and removed at any time (a changed rule starts counting anew). Only kind is required:
//   eio, enospc, again   the transfer moves nothing and ends with that errno
//   short                half of it moves, which is reported
//   zero                 nothing moves, which is reported
//   torn                 half of it moves, all of it is reported
//   flip                 one bit of the transferred data changes, success is reported
//   hang                 never ends
//   transient            refused, interrupted, partial and short calls, all of which a program must survive
// op is read, write or any; match is text in the file's path; each every-th transfer is hit, at most times of them.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, MAX_MARKS = 4096, AS_THE_KERNEL_SAYS = 1 };

struct rule {
    char text[512], kind[16], op[8], match[256];
    unsigned long every, times;
};

struct mark {
    struct iocb* control;  // null: free
    long result;           // to report, or AS_THE_KERNEL_SAYS
    int flip;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule current;
static unsigned long n_matched, n_fired, n_submits, n_events;
static struct mark marks[MAX_MARKS];

// Reads the rule; called with the lock held. Its kind is empty when there is none.
static void read_rule(void)
{
    char text[sizeof current.text] = "";
    const char* file = getenv("AIO_FAULT_FILE");
    if (file != NULL) {
        const int fd = open(file, O_RDONLY | O_CLOEXEC);
        const ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        if (fd >= 0) { close(fd); }
        text[n > 0 ? n : 0] = '\0';
    } else if (getenv("AIO_FAULT") != NULL) {
        strncpy(text, getenv("AIO_FAULT"), sizeof text - 1);
    }
    if (strcmp(text, current.text) == 0) { return; }
    memset(&current, 0, sizeof current);
    strcpy(current.text, text);
    current.every = 1;
    n_matched = n_fired = 0;
    char* rest = NULL;
    for (char* part = strtok_r(text, ",\n", &rest); part != NULL; part = strtok_r(NULL, ",\n", &rest)) {
        sscanf(part, "kind=%15s", current.kind);
        sscanf(part, "op=%7s", current.op);
        sscanf(part, "match=%255s", current.match);
        sscanf(part, "every=%lu", &current.every);
        sscanf(part, "times=%lu", &current.times);
    }
}

static int kind_is(const char* name) { return strcmp(current.kind, name) == 0; }

// Whether the rule takes this transfer; called with the lock held.
static int is_hit(const struct iocb* control)
{
    const int is_read = control->aio_lio_opcode == IO_CMD_PREAD;
    if (current.kind[0] == '\0' || kind_is("transient")) { return 0; }
    if (strcmp(current.op, is_read ? "write" : "read") == 0 || (kind_is("zero") && is_read)) { return 0; }
    if (current.match[0] != '\0') {
        char link[64], path[1024];
        snprintf(link, sizeof link, "/proc/self/fd/%d", control->aio_fildes);
        const ssize_t n = readlink(link, path, sizeof path - 1);
        if (n < 0) { return 0; }
        path[n] = '\0';
        if (strstr(path, current.match) == NULL) { return 0; }
    }
    if (n_matched++ % current.every != current.every - 1) { return 0; }
    if (current.times != 0 && n_fired >= current.times) { return 0; }
    ++n_fired;
    return 1;
}

// Changes a transfer that is hit and notes what to report of it; called with the lock held.
static struct mark* prepare(struct iocb* control)
{
    const unsigned long half = control->u.c.nbytes / (2 * PAGE) * PAGE;
    struct mark* mark = NULL;
    for (int i = 0; i < MAX_MARKS && mark == NULL; ++i) {
        if (marks[i].control == NULL) { mark = &marks[i]; }
    }
    if (mark == NULL) { abort(); }
    mark->control = control;
    mark->result = AS_THE_KERNEL_SAYS;
    mark->flip = kind_is("flip");
    if (kind_is("torn")) { mark->result = (long)control->u.c.nbytes; }
    if (kind_is("eio")) { mark->result = -EIO; }
    if (kind_is("enospc")) { mark->result = -ENOSPC; }
    if (kind_is("again")) { mark->result = -EAGAIN; }
    if (kind_is("zero")) { mark->result = 0; }
    if (kind_is("torn") || (kind_is("short") && half != 0)) { control->u.c.nbytes = half; }
    if (mark->result <= 0) { control->u.c.nbytes = 0; }
    return mark;
}

// One bit in the middle of the transferred data: the exponent of an fp32 number, or of one of two bf16 numbers.
static void flip_bit(const struct iocb* control, unsigned long nbytes)
{
    const unsigned long at = nbytes / 2 / PAGE * PAGE + 3;
    if (control->aio_lio_opcode == IO_CMD_PREAD) {
        ((unsigned char*)control->u.c.buf)[at] ^= 2;
        return;
    }
    char link[64];
    unsigned char byte;
    snprintf(link, sizeof link, "/proc/self/fd/%d", control->aio_fildes);
    const int fd = open(link, O_RDWR | O_CLOEXEC);
    if (fd < 0 || pread(fd, &byte, 1, control->u.c.offset + at) != 1) { abort(); }
    byte ^= 2;
    if (pwrite(fd, &byte, 1, control->u.c.offset + at) != 1) { abort(); }
    close(fd);
}

static long submit_transient(io_context_t context, long n, struct iocb** controls)
{
    const unsigned long call = __atomic_fetch_add(&n_submits, 1, __ATOMIC_RELAXED);
    if (call % 11 == 3) { return -EAGAIN; }
    if (call % 7 == 2) { return -EINTR; }
    if (call % 13 == 5) { return 0; }
    if (n > 1 && call % 3 == 0) { n = n / 2; }
    if (call % 5 == 1 && controls[0]->u.c.nbytes > 2 * PAGE) { controls[0]->u.c.nbytes = 2 * PAGE; }
    const long result = syscall(SYS_io_submit, context, n, controls);
    return result < 0 ? -errno : result;
}

int io_submit(io_context_t context, long n, struct iocb** controls)
{
    pthread_mutex_lock(&lock);
    read_rule();
    const int transient = kind_is("transient"), idle = current.kind[0] == '\0';
    pthread_mutex_unlock(&lock);
    if (transient) { return (int)submit_transient(context, n, controls); }
    if (idle) {
        const long result = syscall(SYS_io_submit, context, n, controls);
        return result < 0 ? -errno : (int)result;
    }
    for (long i = 0; i < n; ++i) {
        const unsigned long nbytes = controls[i]->u.c.nbytes;
        pthread_mutex_lock(&lock);
        const int hit = is_hit(controls[i]), withheld = hit && kind_is("hang");
        struct mark* mark = hit && !withheld ? prepare(controls[i]) : NULL;
        pthread_mutex_unlock(&lock);
        if (withheld) { continue; }
        const long result = syscall(SYS_io_submit, context, 1, &controls[i]);
        if (result == 1) { continue; }
        const int error = errno;
        if (mark != NULL) { mark->control = NULL; }
        controls[i]->u.c.nbytes = nbytes;
        return i > 0 ? (int)i : result < 0 ? -error : 0;
    }
    return (int)n;
}

static void change_events(struct io_event* events, long n)
{
    pthread_mutex_lock(&lock);
    const int transient = kind_is("transient");
    for (long i = 0; i < n; ++i) {
        const unsigned long event = n_events++;
        if (transient && (long)events[i].res > 0) {
            if (event % 17 == 4) { events[i].res = (unsigned long)-EAGAIN; }
            if (event % 19 == 6) { events[i].res = (unsigned long)-EINTR; }
            if (event % 23 == 8 && events[i].res > 5000) { events[i].res = 5000; }
        }
        for (int k = 0; k < MAX_MARKS; ++k) {
            if (marks[k].control != events[i].obj) { continue; }
            if (marks[k].flip && (long)events[i].res > 0) { flip_bit(events[i].obj, events[i].res); }
            if (marks[k].result != AS_THE_KERNEL_SAYS) { events[i].res = (unsigned long)marks[k].result; }
            marks[k].control = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
}

int io_getevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout)
{
    const long result = syscall(SYS_io_getevents, context, least, most, events, timeout);
    if (result > 0) { change_events(events, result); }
    return result < 0 ? -errno : (int)result;
}

int io_pgetevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout,
                  sigset_t* mask)
{
    const struct {
        sigset_t* mask;
        size_t nbytes;
    } signals = {mask, 8};
    const long result = syscall(SYS_io_pgetevents, context, least, most, events, timeout, mask ? &signals : NULL);
    if (result > 0) { change_events(events, result); }
    return result < 0 ? -errno : (int)result;
}
