// SPDX-License-Identifier: Apache-2.0
//
// Threads that are started within its lifetime run none of the process's signal handlers: Python's belong to its main
// thread. Faults of a thread's own are not blocked: the kernel would end the process without a word from faulthandler.

#pragma once

#include <pthread.h>
#include <signal.h>

namespace tencache {

class SignalsBlocked {
public:
    SignalsBlocked()
    {
        sigset_t all;
        sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) { sigdelset(&all, fault); }
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

}  // namespace tencache
