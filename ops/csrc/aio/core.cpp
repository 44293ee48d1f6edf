// SPDX-License-Identifier: Apache-2.0
#include "core.h"

#include <errno.h>
#include <pthread.h>

#include <algorithm>
#include <stdexcept>

#include "signals_blocked.h"

namespace tencache {

namespace {

constexpr int kBackgroundEvery = 8;  // with both kinds waiting, every eighth block is background
constexpr auto kUrgentPeriod = std::chrono::seconds(1);  // after an urgent request, more are expected
constexpr int kQuietFactor = 3;                          // how much more background the kernel has at other times
constexpr int kMostLookedAt = 64;                        // requests, for one that a lane can start at once
constexpr auto kLaneGrace = std::chrono::seconds(1);

Clock::time_point deadline_after(double timeout_s)
{
    // A year stands for no limit, and does not overflow the clock.
    const double bounded_s = timeout_s < 0 ? 365.0 * 86400 : std::min(timeout_s, 365.0 * 86400);
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded_s));
}

std::int64_t ns_since(Clock::time_point start)
{
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

// Lanes' side

IoQueue::Core::Core(const QueueOptions& options) : options_(options)
{
    for (int i = 0; i < options.n_lanes; ++i) { lanes_.push_back(std::make_unique<Lane>(options.queue_depth)); }
}

void IoQueue::Core::start()
{
    const SignalsBlocked blocked;
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

// The oldest request that the lane can start at once; see [Note: files that do not do asynchronous I/O].
Request* IoQueue::Core::first_for(const Lane& lane, Priority priority) const
{
    const auto& waiting = queue(priority);
    if (!lane.synchronous) { return waiting.empty() ? nullptr : waiting.front(); }
    int n = 0;
    for (Request* request : waiting) {
        if (request->transfer.operation == Operation::read || writing_.count(request->transfer.fd) == 0) {
            return request;
        }
        if (++n == kMostLookedAt) { break; }
    }
    return nullptr;
}

// The background request that the lane may continue, if any; see [Note: latency of urgent requests].
Request* IoQueue::Core::background_for(const Lane& lane) const
{
    Request* request = first_for(lane, Priority::background);
    if (request == nullptr) { return nullptr; }
    if (background_in_flight_nbytes_ == 0 || (lane.synchronous && n_urgent_ == 0)) { return request; }
    auto limit = options_.background_nbytes;
    if (n_urgent_ > 0) {
        limit /= 4;
    } else if (Clock::now() - last_urgent_ > kUrgentPeriod) {
        limit *= kQuietFactor;
    }
    return background_in_flight_nbytes_ + next_nbytes(*request) <= limit ? request : nullptr;
}

bool IoQueue::Core::has_work(const Lane& lane) const
{
    return first_for(lane, Priority::urgent) != nullptr || background_for(lane) != nullptr;
}

Request* IoQueue::Core::pick(const Lane& lane)
{
    Request* urgent = first_for(lane, Priority::urgent);
    Request* background = background_for(lane);
    if (urgent != nullptr && !(background != nullptr && n_urgent_in_a_row_ >= kBackgroundEvery - 1)) {
        ++n_urgent_in_a_row_;
        return urgent;
    }
    if (background != nullptr) { n_urgent_in_a_row_ = 0; }
    return background;
}

Work::Taken IoQueue::Core::take(Lane& lane)
{
    std::lock_guard<std::mutex> lock(mutex_);
    lane.waiting = false;
    if (stopping_) { return Taken::stop; }
    // Requests taken earlier come first.
    const int n_wanted = !lane.ready.empty() ? 0 : lane.synchronous ? 1 : kMaxBatch;
    int n = 0;
    while (n < n_wanted && !lane.free.empty()) {
        Request* request = pick(lane);
        if (request == nullptr) { break; }
        const auto operation = static_cast<int>(request->transfer.operation);
        Block* block = lane.free.back();
        lane.free.pop_back();
        block->request = request;
        block->operation = request->transfer.operation;
        block->fd = request->transfer.fd;
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
        block->alone = lane.synchronous && block->operation == Operation::write;
        if (block->alone) { writing_.insert(block->fd); }
        ++n;
    }
    wake_lane();  // for what this lane leaves
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
        if (block->alone) { writing_.erase(block->fd); }
        --request->n_running;
        if (error != 0 || end_of_file) {
            fail(request, error, end_of_file, block->start_offset, block->total_nbytes);
        }
        if (request->n_running == 0 && !request->queued) { end(request); }
    }
}

// Callers' side; the first group with the mutex held

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
        ended_.notify_one();
        if (closing_) { changed_.notify_all(); }
    }
    requests_.erase(request->transfer.id);
}

// One that has something to do, and wakes the next one in turn: for a caller that submits many requests, waking all of
// them would take longer than everything else.
void IoQueue::Core::wake_lane()
{
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        Lane& lane = *lanes_[next_lane_++ % lanes_.size()];
        if (!lane.waiting || !has_work(lane)) { continue; }
        lane.waiting = false;
        lane.wake();
        return;
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
    wake_lane();
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
    ended_.notify_one();
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
        wake_lane();
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
    ended_.wait_until(lock, deadline_after(timeout_s), [this] { return !completions_.empty() || closed_; });
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
    ended_.notify_all();
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

}  // namespace tencache
