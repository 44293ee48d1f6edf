// SPDX-License-Identifier: Apache-2.0
//
// Stands between a program and libaio (LD_PRELOAD) and does what kernels may do and rarely do. AIO_FAULT says what:
//   transient    refused, interrupted, partial and short calls, all of which a program must survive
//   again        every transfer ends with EAGAIN
//   eio          every eleventh transfer ends with EIO
//   zero         every write moves nothing
//   hang         nothing ever ends
#include <errno.h>
#include <libaio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned long n_submits, n_events;

static int fault_is(const char* name)
{
    const char* wanted = getenv("AIO_FAULT");
    return wanted != NULL && strcmp(wanted, name) == 0;
}

int io_submit(io_context_t context, long n, struct iocb** controls)
{
    if (fault_is("transient")) {
        const unsigned long call = __atomic_fetch_add(&n_submits, 1, __ATOMIC_RELAXED);
        if (call % 11 == 3) { return -EAGAIN; }
        if (call % 7 == 2) { return -EINTR; }
        if (call % 13 == 5) { return 0; }
        if (n > 1 && call % 3 == 0) { n = n / 2; }
        if (call % 5 == 1 && controls[0]->u.c.nbytes > 8192) { controls[0]->u.c.nbytes = 8192; }
    }
    const long result = syscall(SYS_io_submit, context, n, controls);
    return result < 0 ? -errno : (int)result;
}

int io_getevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout)
{
    if (fault_is("hang")) { return 0; }
    const long result = syscall(SYS_io_getevents, context, least, most, events, timeout);
    for (long i = 0; i < result; ++i) {
        const unsigned long event = __atomic_fetch_add(&n_events, 1, __ATOMIC_RELAXED);
        if ((long)events[i].res <= 0) { continue; }
        if (fault_is("again")) { events[i].res = (unsigned long)-EAGAIN; }
        if (fault_is("eio") && event % 11 == 10) { events[i].res = (unsigned long)-EIO; }
        if (fault_is("zero") && events[i].obj->aio_lio_opcode == IO_CMD_PWRITE) { events[i].res = 0; }
        if (fault_is("transient")) {
            if (event % 17 == 4) { events[i].res = (unsigned long)-EAGAIN; }
            if (event % 19 == 6) { events[i].res = (unsigned long)-EINTR; }
            if (event % 23 == 8 && events[i].res > 5000) { events[i].res = 5000; }
        }
    }
    return result < 0 ? -errno : (int)result;
}
