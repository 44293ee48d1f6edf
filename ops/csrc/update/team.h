// SPDX-License-Identifier: Apache-2.0
//
// A fixed, small team of threads that takes blocks of work from a queue.
//
// There is no barrier: a thread that the kernel gives no core delays the job whose block it holds, and nothing else. The
// others continue with the blocks of later jobs, so a busy machine costs the team its share of the cores.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tencache {

// Of the steady clock, which on Linux is that of Python's perf_counter_ns().
std::int64_t now_ns();

// Blocks 0 .. n_blocks-1 may run in any order and at the same time; `run` must not throw.
struct Job {
    std::size_t n_blocks = 0;
    std::function<void(std::size_t)> run;

private:
    friend class Team;
    std::size_t next = 0;      // first block that no thread has taken
    std::size_t n_done = 0;
    std::int64_t t_end_ns = 0;  // until it is finished

    bool finished() const { return t_end_ns != 0; }
};

class Team {
public:
    // Threads inherit the caller's core mask. Throws std::system_error when the system has no more threads.
    explicit Team(int n_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int n_threads() const { return static_cast<int>(threads_.size()); }

    // Any thread. Jobs begin in the order in which they came. A job without blocks is finished at once.
    void submit(const std::shared_ptr<Job>& job);

    // Waits until every block of the job has run; false when that takes longer than this number of seconds. Any thread.
    bool wait(const std::shared_ptr<Job>& job, double timeout_s);

    bool finished(const std::shared_ptr<Job>& job) const;

    // When it was finished, by now_ns(); 0 until then.
    std::int64_t end_ns(const std::shared_ptr<Job>& job) const;

    // Waits for all jobs and ends the threads. Idempotent; later jobs are refused with std::runtime_error.
    void close();

    // In a forked child the threads do not exist, and what they waited on can never be destroyed: leave the team as it is.
    bool in_forked_child() const;

private:
    void work();

    mutable std::mutex mutex_;
    std::condition_variable work_to_do_;
    std::condition_variable job_done_;
    std::deque<std::shared_ptr<Job>> queue_;  // with blocks that no thread has taken
    bool closing_ = false;
    std::vector<std::thread> threads_;
    int owner_pid_;
};

}  // namespace tencache
