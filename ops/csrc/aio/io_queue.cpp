// SPDX-License-Identifier: Apache-2.0
#include "io_queue.h"

#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <limits>
#include <list>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>

namespace tencache {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kAlignment = 4096;
constexpr int kMaxRetries = 200;
constexpr auto kRetryPause = std::chrono::milliseconds(5);
constexpr int kMaxBatch = 8;         // blocks taken at a time; more would be kept from the other lanes
constexpr int kBackgroundEvery = 8;  // with both kinds waiting, every eighth block is background
constexpr auto kUrgentPeriod = std::chrono::seconds(1);  // after an urgent request, more are expected
constexpr int kQuietFactor = 4;                          // how much more background the kernel has at other times
constexpr auto kLaneGrace = std::chrono::seconds(1);
constexpr double kDestructorTimeout_s = 10.0;

Clock::time_point deadline_after(double timeout_s)
{
    // A year is for ever, and does not overflow the clock.
    const double bounded_s = timeout_s < 0 ? 365.0 * 86400 : std::min(timeout_s, 365.0 * 86400);
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded_s));
}

std::int64_t ns_since(Clock::time_point start)
{
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

bool may_try_again(int error) { return error == EAGAIN || error == EINTR; }

// Signals are for Python's main thread: a handler on a lane would interrupt its system calls for nothing.
class SignalsBlocked {
public:
    SignalsBlocked()
    {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

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

struct Block {
    iocb control{};
    Request* request = nullptr;
    std::int64_t offset = 0;  // of what is left
    char* address = nullptr;
    std::int64_t nbytes = 0;
    std::int64_t start_offset = 0;  // of the whole block
    std::int64_t total_nbytes = 0;
    Priority priority = Priority::urgent;  // when it was taken
    int n_retries = 0;
    bool in_flight = false;
};

struct Outcome {
    Block* block;
    int error;
    bool end_of_file;
};

}  // namespace

class IoQueue::Core : public std::enable_shared_from_this<IoQueue::Core> {
public:
    explicit Core(const QueueOptions& options);
    ~Core();
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
    // One thread, its kernel context and its eventfd, which both the kernel (a block has ended) and the queue (there is
    // work) signal. Everything but `waiting` and `finished` belongs to the thread.
    class Lane {
    public:
        explicit Lane(int queue_depth);
        ~Lane();
        void run(Core& core);
        void wake() const;
        void close_descriptor();

        bool waiting = false;   // guarded by the core's mutex
        bool finished = false;  // likewise
        std::thread thread;
        int event_fd = -1;
        std::vector<Block*> free;
        std::deque<Block*> ready;  // to be submitted
        // See [Note: files that do not do asynchronous I/O]; assumed until seen otherwise.
        std::atomic<bool> synchronous{true};

    private:
        void submit_ready(Core& core);
        int reap(Core& core);
        void wait() const;
        bool try_again(Block* block, int error);
        void settle(Block* block, std::int64_t result);
        int finish_buffered(Block* block) const;
        void report(Core& core);

        io_context_t context_ = nullptr;
        std::vector<Block> blocks_;
        std::vector<io_event> events_;
        std::vector<Outcome> outcomes_;
        Clock::time_point retry_at_{};
        int n_in_flight_ = 0;
        std::int64_t n_short_ = 0;
        std::int64_t n_retries_ = 0;
    };

    enum class Taken { some, none, stop };

    std::list<Request*>& queue(Priority priority) { return queues_[static_cast<int>(priority)]; }
    const std::list<Request*>& queue(Priority priority) const { return queues_[static_cast<int>(priority)]; }
    Taken take(Lane& lane);
    void end_blocks(const std::vector<Outcome>& outcomes, std::int64_t n_short, std::int64_t n_retries);
    Request* pick(const Lane& lane);
    bool background_may(const Lane& lane) const;
    bool has_work(const Lane& lane) const;
    std::int64_t next_nbytes(const Request& request) const;
    void enqueue(Request* request);
    void dequeue(Request* request);
    bool drop_rest(Request* request, int error);
    void fail(Request* request, int error, bool end_of_file, std::int64_t offset, std::int64_t nbytes);
    void end(Request* request);
    void wake_lanes(std::int64_t n_blocks);

    const QueueOptions options_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;  // a request or a lane has ended, or the queue was closed
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
    Clock::time_point busy_since_[2];
    QueueStats stats_{};
    bool closing_ = false;
    bool stopping_ = false;
    bool closed_ = false;
    int n_given_up_ = 0;
};

// Lane

IoQueue::Core::Lane::Lane(int queue_depth) : blocks_(queue_depth), events_(queue_depth)
{
    event_fd = eventfd(0, EFD_CLOEXEC);
    if (event_fd < 0) { throw std::system_error(errno, std::generic_category(), "eventfd"); }
    const int result = io_setup(queue_depth, &context_);
    if (result < 0) {
        ::close(event_fd);
        throw std::system_error(-result, std::generic_category(), "io_setup");
    }
    free.reserve(blocks_.size());
    for (auto& block : blocks_) { free.push_back(&block); }
}

IoQueue::Core::Lane::~Lane()
{
    // With a block in flight, io_destroy() would wait for the device: such a context is left to the end of the process.
    if (n_in_flight_ == 0 && context_ != nullptr) { io_destroy(context_); }
    close_descriptor();
}

void IoQueue::Core::Lane::close_descriptor()
{
    if (event_fd >= 0) { ::close(event_fd); }
    event_fd = -1;
}

void IoQueue::Core::Lane::wake() const
{
    const std::uint64_t one = 1;
    while (::write(event_fd, &one, sizeof(one)) < 0 && errno == EINTR) {}
}

void IoQueue::Core::Lane::wait() const
{
    if (!ready.empty()) {  // a retry is due at a certain time
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(retry_at_ - Clock::now()).count() + 1;
        pollfd wanted{event_fd, POLLIN, 0};
        if (left <= 0 || ::poll(&wanted, 1, static_cast<int>(left)) <= 0) { return; }
    }
    std::uint64_t count = 0;
    while (::read(event_fd, &count, sizeof(count)) < 0 && errno == EINTR) {}
}

void IoQueue::Core::Lane::run(Core& core)
{
    while (true) {
        const Taken taken = core.take(*this);
        if (taken == Taken::stop) { break; }
        submit_ready(core);
        if (reap(core) == 0 && taken == Taken::none) { wait(); }
    }
    if (n_in_flight_ == 0) {
        io_destroy(context_);
        context_ = nullptr;
    }
}

bool IoQueue::Core::Lane::try_again(Block* block, int error)
{
    if (!may_try_again(error) || ++block->n_retries > kMaxRetries) { return false; }
    ++n_retries_;
    if (error == EAGAIN) { retry_at_ = Clock::now() + kRetryPause; }
    return true;
}

void IoQueue::Core::Lane::submit_ready(Core& core)
{
    iocb* controls[kMaxBatch];
    while (!ready.empty() && Clock::now() >= retry_at_) {
        const int n = static_cast<int>(std::min<std::size_t>(ready.size(), kMaxBatch));
        for (int i = 0; i < n; ++i) {
            Block* block = ready[i];
            const int fd = block->request->transfer.fd;
            if (block->request->transfer.operation == Operation::read) {
                io_prep_pread(&block->control, fd, block->address, block->nbytes, block->offset);
            } else {
                io_prep_pwrite(&block->control, fd, block->address, block->nbytes, block->offset);
            }
            io_set_eventfd(&block->control, event_fd);
            block->control.data = block;
            controls[i] = &block->control;
        }
        const bool was_empty = n_in_flight_ == 0;
        const int result = io_submit(context_, n, controls);
        if (result > 0) {  // perhaps not all; the reason comes with the next call
            for (int i = 0; i < result; ++i) {
                ready.front()->in_flight = true;
                ready.pop_front();
            }
            n_in_flight_ += result;
            if (was_empty) { synchronous = reap(core) >= result; }
            continue;
        }
        Block* first = ready.front();
        const int error = result == 0 ? EAGAIN : -result;
        if (!try_again(first, error)) {
            ready.pop_front();
            outcomes_.push_back({first, error, false});
        }
    }
    report(core);
}

int IoQueue::Core::Lane::reap(Core& core)
{
    int n_reaped = 0;
    while (n_in_flight_ > 0) {
        timespec at_once{0, 0};
        const int n = io_getevents(context_, 0, static_cast<long>(events_.size()), events_.data(), &at_once);
        if (n == -EINTR) { continue; }
        if (n == 0) { break; }
        if (n < 0) {  // the context is unusable: nothing in it will ever be reported
            for (auto& block : blocks_) {
                if (!block.in_flight) { continue; }
                block.in_flight = false;
                outcomes_.push_back({&block, -n, false});
                ++n_reaped;
            }
            n_in_flight_ = 0;
            break;
        }
        for (int i = 0; i < n; ++i) {
            Block* block = static_cast<Block*>(events_[i].data);
            block->in_flight = false;
            settle(block, static_cast<std::int64_t>(static_cast<long>(events_[i].res)));
        }
        n_in_flight_ -= n;
        n_reaped += n;
    }
    report(core);
    return n_reaped;
}

// What the kernel says about a block: done, to be continued, to be tried again, or failed.
void IoQueue::Core::Lane::settle(Block* block, std::int64_t result)
{
    const bool is_read = block->request->transfer.operation == Operation::read;
    if (result < 0) {
        const int error = static_cast<int>(-result);
        if (try_again(block, error)) {
            ready.push_back(block);
        } else {
            outcomes_.push_back({block, error, false});
        }
        return;
    }
    if (result == 0 || result > block->nbytes) {
        outcomes_.push_back({block, is_read && result == 0 ? 0 : EIO, is_read && result == 0});
        return;
    }
    block->address += result;
    block->offset += result;
    block->nbytes -= result;
    if (block->nbytes == 0) {
        outcomes_.push_back({block, 0, false});
        return;
    }
    ++n_short_;
    const bool at_a_boundary = block->offset % kAlignment == 0;
    if (at_a_boundary || (fcntl(block->request->transfer.fd, F_GETFL) & O_DIRECT) == 0) {
        ready.push_back(block);
        return;
    }
    // What stopped in the middle of a sector cannot go on with O_DIRECT: the page cache finishes it.
    const int error = finish_buffered(block);
    outcomes_.push_back({block, std::max(error, 0), error < 0});
}

// 0, an errno, or -1 for the end of the file.
int IoQueue::Core::Lane::finish_buffered(Block* block) const
{
    const bool is_read = block->request->transfer.operation == Operation::read;
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", block->request->transfer.fd);
    const int fd = ::open(path, (is_read ? O_RDONLY : O_WRONLY) | O_CLOEXEC);
    if (fd < 0) { return errno; }
    int error = 0;
    while (block->nbytes > 0) {
        const ssize_t n = is_read ? ::pread(fd, block->address, block->nbytes, block->offset)
                                  : ::pwrite(fd, block->address, block->nbytes, block->offset);
        if (n > 0) {
            block->address += n;
            block->offset += n;
            block->nbytes -= n;
        } else if (n < 0 && may_try_again(errno) && ++block->n_retries <= kMaxRetries) {
            if (errno == EAGAIN) { std::this_thread::sleep_for(kRetryPause); }
        } else {
            error = n < 0 ? errno : is_read ? -1 : EIO;
            break;
        }
    }
    ::close(fd);
    return error;
}

void IoQueue::Core::Lane::report(Core& core)
{
    if (outcomes_.empty()) { return; }
    core.end_blocks(outcomes_, n_short_, n_retries_);
    n_short_ = n_retries_ = 0;
    for (const auto& outcome : outcomes_) { free.push_back(outcome.block); }
    outcomes_.clear();
}

// Core, lanes' side

IoQueue::Core::Core(const QueueOptions& options) : options_(options)
{
    for (int i = 0; i < options.n_lanes; ++i) { lanes_.push_back(std::make_unique<Lane>(options.queue_depth)); }
}

IoQueue::Core::~Core() = default;

void IoQueue::Core::start()
{
    // A lane that hangs in a system call outlives the queue: it owns a share of what it works with.
    SignalsBlocked signals_blocked;
    for (auto& lane : lanes_) {
        lane->thread = std::thread([core = shared_from_this(), lane = lane.get()] {
            pthread_setname_np(pthread_self(), "tencache-io");
            lane->run(*core);
            std::lock_guard<std::mutex> lock(core->mutex_);
            lane->finished = true;
            core->changed_.notify_all();
        });
    }
}

std::int64_t IoQueue::Core::next_nbytes(const Request& request) const
{
    return std::min(options_.block_nbytes, request.transfer.nbytes - request.next);
}

// See [Note: latency of urgent requests].
bool IoQueue::Core::background_may(const Lane& lane) const
{
    const auto& background = queue(Priority::background);
    if (background.empty()) { return false; }
    if (background_in_flight_nbytes_ == 0 || (lane.synchronous && n_urgent_ == 0)) { return true; }
    auto limit = options_.background_nbytes;
    if (n_urgent_ > 0) {
        limit /= 4;
    } else if (Clock::now() - last_urgent_ > kUrgentPeriod) {
        limit *= kQuietFactor;
    }
    return background_in_flight_nbytes_ + next_nbytes(*background.front()) <= limit;
}

bool IoQueue::Core::has_work(const Lane& lane) const
{
    return !queue(Priority::urgent).empty() || background_may(lane);
}

Request* IoQueue::Core::pick(const Lane& lane)
{
    const bool has_urgent = !queue(Priority::urgent).empty();
    const bool has_background = background_may(lane);
    if (has_urgent && !(has_background && n_urgent_in_a_row_ >= kBackgroundEvery - 1)) {
        ++n_urgent_in_a_row_;
        return queue(Priority::urgent).front();
    }
    if (!has_background) { return nullptr; }
    n_urgent_in_a_row_ = 0;
    return queue(Priority::background).front();
}

IoQueue::Core::Taken IoQueue::Core::take(Lane& lane)
{
    std::lock_guard<std::mutex> lock(mutex_);
    lane.waiting = false;
    if (stopping_) { return Taken::stop; }
    // First what was taken before.
    const int n_wanted = !lane.ready.empty() ? 0 : lane.synchronous ? 1 : kMaxBatch;
    int n = 0;
    while (n < n_wanted && !lane.free.empty()) {
        Request* request = pick(lane);
        if (request == nullptr) { break; }
        const auto operation = static_cast<int>(request->transfer.operation);
        Block* block = lane.free.back();
        lane.free.pop_back();
        block->request = request;
        block->nbytes = block->total_nbytes = next_nbytes(*request);
        block->offset = block->start_offset = request->transfer.offset + request->next;
        block->address = request->transfer.address + request->next;
        block->priority = request->transfer.priority;
        block->n_retries = 0;
        lane.ready.push_back(block);
        request->next += block->nbytes;
        ++request->n_running;
        if (request->next == request->transfer.nbytes) { dequeue(request); }
        if (block->priority == Priority::background) { background_in_flight_nbytes_ += block->nbytes; }
        if (n_running_[operation]++ == 0) { busy_since_[operation] = Clock::now(); }
        ++n;
    }
    wake_lanes(1);  // for what this lane leaves
    lane.waiting = n == 0 && lane.ready.empty() && !lane.free.empty();
    return n == 0 ? Taken::none : Taken::some;
}

void IoQueue::Core::end_blocks(const std::vector<Outcome>& outcomes, std::int64_t n_short, std::int64_t n_retries)
{
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.n_short += n_short;
    stats_.n_retries += n_retries;
    for (const auto& [block, error, end_of_file] : outcomes) {
        Request* request = block->request;
        const auto operation = static_cast<int>(request->transfer.operation);
        const auto nbytes_moved = block->total_nbytes - block->nbytes;
        request->end.nbytes_moved += nbytes_moved;
        stats_.nbytes[operation] += nbytes_moved;
        if (block->priority == Priority::background) { background_in_flight_nbytes_ -= block->total_nbytes; }
        if (--n_running_[operation] == 0) { stats_.busy_ns[operation] += ns_since(busy_since_[operation]); }
        --request->n_running;
        if (error != 0 || end_of_file) {
            fail(request, error, end_of_file, block->start_offset, block->total_nbytes);
        }
        if (request->n_running == 0 && !request->queued) { end(request); }
    }
}

// Core, callers' side; the first group with the mutex held

void IoQueue::Core::enqueue(Request* request)
{
    auto& waiting = queue(request->transfer.priority);
    request->place = waiting.insert(waiting.end(), request);
    request->queued = true;
}

void IoQueue::Core::dequeue(Request* request)
{
    if (!request->queued) { return; }
    queue(request->transfer.priority).erase(request->place);
    request->queued = false;
}

void IoQueue::Core::fail(Request* request,
                         int error,
                         bool end_of_file,
                         std::int64_t offset,
                         std::int64_t nbytes)
{
    dequeue(request);  // what has not been taken is dropped
    if (request->failed) { return; }
    request->failed = true;
    request->end.error = error;
    request->end.end_of_file = end_of_file;
    request->end.error_offset = offset;
    request->end.error_nbytes = nbytes;
}

bool IoQueue::Core::drop_rest(Request* request, int error)
{
    if (!request->queued) { return false; }
    const auto& transfer = request->transfer;
    fail(request, error, false, transfer.offset + request->next, transfer.nbytes - request->next);
    if (request->n_running == 0) { end(request); }
    return true;
}

void IoQueue::Core::end(Request* request)
{
    if (request->transfer.priority == Priority::urgent) {
        --n_urgent_;
        last_urgent_ = Clock::now();
    }
    if (!request->given_up) {
        --n_live_;
        completions_.push_back(request->end);
        changed_.notify_all();
    }
    requests_.erase(request->transfer.id);
}

void IoQueue::Core::wake_lanes(std::int64_t n_blocks)
{
    for (std::size_t i = 0; i < lanes_.size() && n_blocks > 0; ++i) {
        Lane& lane = *lanes_[next_lane_++ % lanes_.size()];
        if (!lane.waiting || !has_work(lane)) { continue; }
        lane.waiting = false;
        lane.wake();
        n_blocks -= lane.synchronous ? 1 : kMaxBatch;
    }
}

bool IoQueue::Core::submit(const Transfer& transfer)
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) { return false; }
    if (requests_.count(transfer.id) != 0) { throw std::invalid_argument("the id of a request is in use"); }
    auto request = std::make_unique<Request>();
    request->transfer = transfer;
    request->end.id = transfer.id;
    enqueue(request.get());
    if (transfer.priority == Priority::urgent) { ++n_urgent_; }
    ++n_live_;
    requests_.emplace(transfer.id, std::move(request));
    wake_lanes((transfer.nbytes + options_.block_nbytes - 1) / options_.block_nbytes);
    return true;
}

bool IoQueue::Core::submit_failed(std::uint64_t id, int error)
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) { return false; }
    Completion end{};
    end.id = id;
    end.error = error;
    completions_.push_back(end);
    changed_.notify_all();
    return true;
}

bool IoQueue::Core::promote(std::uint64_t id)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end()) { return false; }
    Request* request = found->second.get();
    if (request->transfer.priority == Priority::urgent) { return true; }
    const bool queued = request->queued;
    dequeue(request);
    request->transfer.priority = Priority::urgent;  // of use even if the kernel has all: background makes room
    ++n_urgent_;
    if (queued) {
        enqueue(request);
        wake_lanes((request->transfer.nbytes - request->next) / options_.block_nbytes + 1);
    }
    return true;
}

bool IoQueue::Core::cancel(std::uint64_t id)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    return found != requests_.end() && drop_rest(found->second.get(), ECANCELED);
}

std::vector<Completion> IoQueue::Core::collect(std::size_t max_n, double timeout_s)
{
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, deadline_after(timeout_s), [this] { return !completions_.empty() || closed_; });
    const auto n = static_cast<std::ptrdiff_t>(std::min(max_n, completions_.size()));
    std::vector<Completion> result(completions_.begin(), completions_.begin() + n);
    completions_.erase(completions_.begin(), completions_.begin() + n);
    return result;
}

int IoQueue::Core::close(double timeout_s, bool drop_waiting)
{
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_) {  // by another thread
        changed_.wait_until(lock, deadline_after(timeout_s), [this] { return closed_; });
        return n_given_up_;
    }
    closing_ = true;
    const auto drop_all_waiting = [this] {
        for (auto& waiting : queues_) {
            while (!waiting.empty()) { drop_rest(waiting.front(), ECANCELED); }
        }
    };
    if (drop_waiting) { drop_all_waiting(); }
    const auto none_left = [this] { return n_live_ == 0; };
    if (!changed_.wait_until(lock, deadline_after(timeout_s), none_left)) {
        drop_all_waiting();
        for (auto& [id, request] : requests_) {
            if (request->given_up) { continue; }
            const auto& transfer = request->transfer;
            fail(request.get(), ETIMEDOUT, false, transfer.offset, transfer.nbytes);
            request->given_up = true;
            request->end.in_flight = true;
            completions_.push_back(request->end);
            --n_live_;
            ++n_given_up_;
        }
    }
    stopping_ = true;
    for (auto& lane : lanes_) { lane->wake(); }
    changed_.wait_until(lock, Clock::now() + kLaneGrace, [this] {
        return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
            return lane->finished || !lane->thread.joinable();
        });
    });
    std::vector<Lane*> ended;
    for (auto& lane : lanes_) {
        if (!lane->thread.joinable()) { continue; }
        if (lane->finished) {
            ended.push_back(lane.get());
        } else {  // hangs in a system call
            lane->thread.detach();
        }
    }
    lock.unlock();
    for (Lane* lane : ended) {
        lane->thread.join();
        lane->close_descriptor();
    }
    lock.lock();
    closed_ = true;
    changed_.notify_all();
    return n_given_up_;
}

bool IoQueue::Core::closed() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
}

QueueStats IoQueue::Core::stats() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    QueueStats result = stats_;
    for (int operation = 0; operation < 2; ++operation) {
        if (n_running_[operation] > 0) { result.busy_ns[operation] += ns_since(busy_since_[operation]); }
    }
    result.n_requests = n_live_;
    return result;
}

void IoQueue::Core::close_descriptors_of_child()
{
    for (auto& lane : lanes_) { lane->close_descriptor(); }
}

// IoQueue

IoQueue::IoQueue(const QueueOptions& options) : core_(std::make_shared<Core>(options)), pid_(getpid())
{
    try {
        core_->start();
    } catch (...) {  // a thread could not be made: end those that were
        core_->close(0, true);
        throw;
    }
}

IoQueue::~IoQueue()
{
    if (getpid() == pid_) {
        core_->close(kDestructorTimeout_s, true);
        return;
    }
    // A forked child has the memory but not the threads, and a mutex may be locked for ever: hands off, never destroyed.
    core_->close_descriptors_of_child();
    new std::shared_ptr<Core>(core_);
}

bool IoQueue::submit(const Transfer& transfer) { return getpid() == pid_ && core_->submit(transfer); }

bool IoQueue::submit_failed(std::uint64_t id, int error)
{
    return getpid() == pid_ && core_->submit_failed(id, error);
}

bool IoQueue::promote(std::uint64_t id) { return getpid() == pid_ && core_->promote(id); }

bool IoQueue::cancel(std::uint64_t id) { return getpid() == pid_ && core_->cancel(id); }

std::vector<Completion> IoQueue::collect(std::size_t max_n, double timeout_s)
{
    if (getpid() != pid_) { return {}; }
    return core_->collect(max_n, timeout_s);
}

int IoQueue::close(double timeout_s, bool drop_waiting)
{
    return getpid() == pid_ ? core_->close(timeout_s, drop_waiting) : 0;
}

bool IoQueue::closed() const { return getpid() != pid_ || core_->closed(); }

QueueStats IoQueue::stats() const { return getpid() == pid_ ? core_->stats() : QueueStats{}; }

}  // namespace tencache
