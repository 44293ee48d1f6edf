// SPDX-License-Identifier: Apache-2.0
#include "lane.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <system_error>

namespace tencache {

namespace {

constexpr std::int64_t kAlignment = 4096;
constexpr int kMaxRetries = 200;
constexpr auto kRetryPause = std::chrono::milliseconds(5);

bool may_try_again(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

Lane::Lane(int queue_depth) : blocks_(queue_depth), events_(queue_depth)
{
    event_fd_ = eventfd(0, EFD_CLOEXEC);
    if (event_fd_ < 0) { throw std::system_error(errno, std::generic_category(), "eventfd"); }
    const int result = io_setup(queue_depth, &context_);
    if (result < 0) {
        ::close(event_fd_);
        throw std::system_error(-result, std::generic_category(), "io_setup");
    }
    free.reserve(blocks_.size());
    for (auto& block : blocks_) { free.push_back(&block); }
}

Lane::~Lane()
{
    // With a block in flight, io_destroy() would wait for the device: such a context is left to the end of the process.
    if (n_in_flight_ == 0 && context_ != nullptr) { io_destroy(context_); }
    close_descriptor();
}

void Lane::close_descriptor()
{
    if (event_fd_ >= 0) { ::close(event_fd_); }
    event_fd_ = -1;
}

void Lane::wake() const
{
    const std::uint64_t one = 1;
    while (::write(event_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {}
}

void Lane::wait() const
{
    if (!ready.empty()) {  // a retry is due at a certain time
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(retry_at_ - Clock::now()).count() + 1;
        pollfd wanted{event_fd_, POLLIN, 0};
        if (left <= 0 || ::poll(&wanted, 1, static_cast<int>(left)) <= 0) { return; }
    }
    std::uint64_t count = 0;
    while (::read(event_fd_, &count, sizeof(count)) < 0 && errno == EINTR) {}
}

void Lane::run(Work& work)
{
    while (true) {
        const Work::Taken taken = work.take(*this);
        if (taken == Work::Taken::stop) { break; }
        submit_ready(work);
        if (reap(work) == 0 && taken == Work::Taken::none) { wait(); }
    }
    if (n_in_flight_ == 0) {
        io_destroy(context_);
        context_ = nullptr;
    }
}

bool Lane::try_again(Block* block, int error)
{
    if (!may_try_again(error) || ++block->n_retries > kMaxRetries) { return false; }
    ++n_retries_;
    if (error == EAGAIN) { retry_at_ = Clock::now() + kRetryPause; }
    return true;
}

void Lane::submit_ready(Work& work)
{
    iocb* controls[kMaxBatch];
    while (!ready.empty() && Clock::now() >= retry_at_) {
        const int n = static_cast<int>(std::min<std::size_t>(ready.size(), kMaxBatch));
        for (int i = 0; i < n; ++i) {
            Block* block = ready[i];
            const int fd = block->fd;
            if (block->operation == Operation::read) {
                io_prep_pread(&block->control, fd, block->address, block->nbytes, block->offset);
            } else {
                io_prep_pwrite(&block->control, fd, block->address, block->nbytes, block->offset);
            }
            io_set_eventfd(&block->control, event_fd_);
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
            if (was_empty) { synchronous = reap(work) >= result; }
            continue;
        }
        Block* first = ready.front();
        const int error = result == 0 ? EAGAIN : -result;
        if (!try_again(first, error)) {
            ready.pop_front();
            outcomes_.push_back({first, error, false});
        }
    }
    report(work);
}

int Lane::reap(Work& work)
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
    report(work);
    return n_reaped;
}

// The kernel's result for a block: done, to be continued, to be retried, or failed.
void Lane::settle(Block* block, std::int64_t result)
{
    const bool is_read = block->operation == Operation::read;
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
    if (at_a_boundary || (fcntl(block->fd, F_GETFL) & O_DIRECT) == 0) {
        ready.push_back(block);
        return;
    }
    // A transfer that stopped in the middle of a sector cannot continue with O_DIRECT: the page cache finishes it.
    const int error = finish_buffered(block);
    outcomes_.push_back({block, std::max(error, 0), error < 0});
}

// 0, an errno, or -1 for the end of the file.
int Lane::finish_buffered(Block* block) const
{
    const bool is_read = block->operation == Operation::read;
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", block->fd);
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

void Lane::report(Work& work)
{
    if (outcomes_.empty()) { return; }
    work.end_blocks(outcomes_, n_short_, n_retries_);
    n_short_ = n_retries_ = 0;
    for (const auto& outcome : outcomes_) { free.push_back(outcome.block); }
    outcomes_.clear();
}

}  // namespace tencache
