// SPDX-License-Identifier: Apache-2.0
//
// A thread that makes the same call again and again and keeps the results, such as whether a device has work to do.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace tencache {

// A function of a C library with one argument, which any thread may call.
struct Call {
    int (*function)(void*);
    void* argument;

    int operator()() const { return function(argument); }
};

struct Sample {
    std::int64_t t_ns;  // by now_ns(), before the call
    int result;
};

class Sampler {
public:
    // Begins at once. Where the samples are `capacity` in number, every second one is dropped and the period is doubled.
    //
    // preparations: the thread's first calls; one that does not return 0 ends it.
    // lifetime_ns: after so long the thread ends by itself.
    Sampler(std::vector<Call> preparations,
            Call call,
            std::int64_t period_ns,
            std::int64_t lifetime_ns,
            std::size_t capacity);
    ~Sampler();
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;

    // Ends the thread, within a period. Idempotent; one thread at a time, like everything here.
    void close();

    // Once closed.
    const std::vector<Sample>& samples() const { return samples_; }

    // Once closed: the result of the preparation that failed, or 0.
    int error() const { return error_; }

private:
    void work();

    const std::vector<Call> preparations_;
    const Call call_;
    std::int64_t period_ns_;
    const std::int64_t lifetime_ns_;
    const std::size_t capacity_;
    std::vector<Sample> samples_;
    int error_ = 0;
    std::atomic<bool> closing_{false};  // no condition variable: a forked child could not destroy one that is waited on
    int owner_pid_;
    std::thread thread_;  // last, so that it finds the rest in place
};

}  // namespace tencache
