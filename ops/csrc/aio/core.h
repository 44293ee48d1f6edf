// SPDX-License-Identifier: Apache-2.0
//
// The work of the lanes: requests, their order, and their outcome. One mutex guards all of it.

#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "io_queue.h"
#include "lane.h"

namespace tencache {

struct Request {
    Transfer transfer;
    std::int64_t next = 0;  // first byte that no lane has taken
    int n_running = 0;      // blocks that lanes have
    bool queued = false;
    bool given_up = false;  // reported already, only waits for its blocks
    std::list<Request*>::iterator place;
    Completion end{};
    bool failed = false;
};

// Lanes hold a share of it: one that hangs in a system call outlives the queue.
class IoQueue::Core : public Work, public std::enable_shared_from_this<IoQueue::Core> {
public:
    explicit Core(const QueueOptions& options);
    void start();

    bool submit(const Transfer& transfer);
    bool submit_failed(std::uint64_t id, int error);
    bool promote(std::uint64_t id);
    bool cancel(std::uint64_t id);
    std::vector<Completion> collect(std::size_t max_n, double timeout_s);
    int close(double timeout_s, bool drop_waiting);
    bool closed() const;
    QueueStats stats() const;
    void close_descriptors_of_child();

private:
    std::list<Request*>& queue(Priority priority) { return queues_[static_cast<int>(priority)]; }
    const std::list<Request*>& queue(Priority priority) const { return queues_[static_cast<int>(priority)]; }
    Taken take(Lane& lane) override;
    void end_blocks(const std::vector<Outcome>& outcomes, std::int64_t n_short, std::int64_t n_retries) override;
    Request* first_for(const Lane& lane, Priority priority) const;
    Request* pick(const Lane& lane);
    Request* background_for(const Lane& lane) const;
    bool has_work(const Lane& lane) const;
    std::int64_t next_nbytes(const Request& request) const;
    void enqueue(Request* request);
    void dequeue(Request* request);
    bool drop_rest(Request* request, int error);
    void fail(Request* request, int error, bool end_of_file, std::int64_t offset, std::int64_t nbytes);
    void end(Request* request);
    void wake_lane();

    const QueueOptions options_;
    mutable std::mutex mutex_;
    std::condition_variable ended_;    // a request has ended, for one collector, or the queue was closed, for all
    std::condition_variable changed_;  // a lane has ended, a request while the queue closes, or the queue was closed
    std::list<Request*> queues_[2];
    std::unordered_map<std::uint64_t, std::unique_ptr<Request>> requests_;
    std::deque<Completion> completions_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::size_t next_lane_ = 0;
    std::int64_t n_urgent_ = 0;  // requests that have not ended
    Clock::time_point last_urgent_{};  // end of the last of them
    std::int64_t n_live_ = 0;    // requests neither ended nor given up
    int n_urgent_in_a_row_ = 0;
    std::int64_t background_in_flight_nbytes_ = 0;
    std::int64_t n_running_[2] = {0, 0};
    std::unordered_set<int> writing_;  // descriptors that a synchronous lane writes to
    Clock::time_point busy_since_[2];
    QueueStats stats_{};
    bool closing_ = false;
    bool stopping_ = false;
    bool closed_ = false;
    int n_given_up_ = 0;
};

}  // namespace tencache
