// SPDX-License-Identifier: Apache-2.0

#include "sampler.h"

#include <chrono>
#include <pthread.h>
#include <unistd.h>
#include <utility>

#include "signals_blocked.h"
#include "team.h"

namespace tencache {

Sampler::Sampler(std::vector<Call> preparations,
                 Call call,
                 std::int64_t period_ns,
                 std::int64_t lifetime_ns,
                 std::size_t capacity)
    : preparations_(std::move(preparations)),
      call_(call),
      period_ns_(period_ns),
      lifetime_ns_(lifetime_ns),
      capacity_(capacity),
      owner_pid_(static_cast<int>(getpid()))
{
    samples_.reserve(capacity_);
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { work(); });
    pthread_setname_np(thread_.native_handle(), "tencache-sample");
}

Sampler::~Sampler() { close(); }

void Sampler::close()
{
    if (!thread_.joinable()) { return; }
    if (static_cast<int>(getpid()) != owner_pid_) {
        thread_.detach();  // a forked child has no such thread
        return;
    }
    closing_ = true;
    thread_.join();
}

void Sampler::work()
{
    for (const Call& prepare : preparations_) {
        error_ = prepare();
        if (error_ != 0) { return; }
    }
    auto next = std::chrono::steady_clock::now();
    const auto end = next + std::chrono::nanoseconds(lifetime_ns_);
    while (!closing_ && std::chrono::steady_clock::now() < end) {
        const std::int64_t t_ns = now_ns();
        samples_.push_back({t_ns, call_()});
        if (samples_.size() >= capacity_) {
            std::size_t kept = 0;
            for (std::size_t index = 0; index < samples_.size(); index += 2) { samples_[kept++] = samples_[index]; }
            samples_.resize(kept);
            period_ns_ *= 2;
        }
        // Where the thread was kept from its core, samples are left out: the others stay evenly spaced.
        const std::chrono::nanoseconds period(period_ns_);
        const auto now = std::chrono::steady_clock::now();
        while (next <= now) { next += period; }
        std::this_thread::sleep_until(next);
    }
}

}  // namespace tencache
