// SPDX-License-Identifier: Apache-2.0

#include "team.h"

#include <chrono>
#include <pthread.h>
#include <stdexcept>
#include <unistd.h>

#include "signals_blocked.h"

namespace tencache {

std::int64_t now_ns()
{
    const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
}

Team::Team(int n_threads) : owner_pid_(static_cast<int>(getpid()))
{
    try {
        const SignalsBlocked blocked;
        for (int i = 0; i < n_threads; ++i) {
            threads_.emplace_back([this] { work(); });
            pthread_setname_np(threads_.back().native_handle(), "tencache-update");
        }
    } catch (...) {
        close();
        throw;
    }
}

Team::~Team() { close(); }

void Team::submit(const std::shared_ptr<Job>& job)
{
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) { throw std::runtime_error("the update team is closed"); }
        if (job->n_blocks == 0) {
            job->t_end_ns = now_ns();
            return;
        }
        queue_.push_back(job);
    }
    work_to_do_.notify_one();  // which wakes the next one, and so on: waking a thread takes tens of microseconds
}

bool Team::wait(const std::shared_ptr<Job>& job, double timeout_s)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return job_done_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return job->finished(); });
}

bool Team::finished(const std::shared_ptr<Job>& job) const
{
    const std::lock_guard<std::mutex> lock(mutex_);
    return job->finished();
}

std::int64_t Team::end_ns(const std::shared_ptr<Job>& job) const
{
    const std::lock_guard<std::mutex> lock(mutex_);
    return job->t_end_ns;
}

bool Team::in_forked_child() const { return static_cast<int>(getpid()) != owner_pid_; }

void Team::close()
{
    if (in_forked_child()) {
        // A forked child has a copy of the handles and none of the threads, and the lock may be held by one of them.
        for (std::thread& thread : threads_) { thread.detach(); }
        threads_.clear();
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    work_to_do_.notify_all();
    for (std::thread& thread : threads_) { thread.join(); }
    threads_.clear();
}

void Team::work()
{
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        work_to_do_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) { return; }
        const std::shared_ptr<Job> job = queue_.front();
        const std::size_t block = job->next++;
        if (job->next == job->n_blocks) { queue_.pop_front(); }
        const bool more = !queue_.empty();
        lock.unlock();
        if (more) { work_to_do_.notify_one(); }
        job->run(block);
        lock.lock();
        if (++job->n_done == job->n_blocks) {
            job->t_end_ns = now_ns();
            job_done_.notify_all();
        }
    }
}

}  // namespace tencache
