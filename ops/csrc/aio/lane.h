// SPDX-License-Identifier: Apache-2.0
//
// A lane: submits blocks to the kernel and looks at what becomes of each.

#pragma once

#include <libaio.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <thread>
#include <vector>

#include "io_queue.h"

namespace tencache {

using Clock = std::chrono::steady_clock;

constexpr int kMaxBatch = 8;  // blocks taken at a time; more would be kept from the other lanes

struct Request;

struct Block {
    iocb control{};
    Request* request = nullptr;  // the request it is a part of
    Operation operation = Operation::read;
    int fd = -1;
    std::int64_t offset = 0;  // of the remainder
    char* address = nullptr;
    std::int64_t nbytes = 0;
    std::int64_t start_offset = 0;  // of the whole block
    std::int64_t total_nbytes = 0;
    Priority priority = Priority::urgent;  // when it was taken
    int n_retries = 0;
    bool alone = false;  // no other synchronous lane writes to the file meanwhile
    bool in_flight = false;
};

struct Outcome {
    Block* block;
    int error;
    bool end_of_file;
};

class Lane;

// Where a lane's blocks come from and go to. Called in lane threads.
class Work {
public:
    enum class Taken { some, none, stop };

    virtual ~Work() = default;
    // Moves blocks from lane.free to lane.ready. After `none` the lane sleeps until it is woken or a block ends.
    virtual Taken take(Lane& lane) = 0;
    virtual void end_blocks(const std::vector<Outcome>& outcomes, std::int64_t n_short, std::int64_t n_retries) = 0;
};

// One thread, its kernel context and its eventfd, which both the kernel (a block has ended) and the queue (there is
// work) signal.
class Lane {
public:
    explicit Lane(int queue_depth);
    ~Lane();
    void run(Work& work);
    void wake() const;
    void close_descriptor();

    // Guarded by the mutex of the owner of the work's bookkeeping.
    bool waiting = false;
    bool finished = false;

    std::thread thread;
    // Only for the lane's own thread, and take() in it.
    std::vector<Block*> free;
    std::deque<Block*> ready;  // to be submitted
    // See [Note: files that do not do asynchronous I/O]; assumed until seen otherwise.
    std::atomic<bool> synchronous{true};

private:
    void submit_ready(Work& work);
    int reap(Work& work);
    void wait() const;
    bool try_again(Block* block, int error);
    void settle(Block* block, std::int64_t result);
    int finish_buffered(Block* block) const;
    void report(Work& work);

    int event_fd_ = -1;
    io_context_t context_ = nullptr;
    std::vector<Block> blocks_;
    std::vector<io_event> events_;
    std::vector<Outcome> outcomes_;
    Clock::time_point retry_at_{};
    int n_in_flight_ = 0;
    std::int64_t n_short_ = 0;
    std::int64_t n_retries_ = 0;
};

}  // namespace tencache
