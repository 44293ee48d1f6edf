// SPDX-License-Identifier: Apache-2.0
#include "io_queue.h"

#include <unistd.h>

#include "core.h"

namespace tencache {

namespace {

constexpr double kDestructorTimeout_s = 10.0;

}  // namespace

IoQueue::IoQueue(const QueueOptions& options) : core_(std::make_shared<Core>(options)), pid_(getpid())
{
    try {
        core_->start();
    } catch (...) {  // a thread could not be created: end those that were
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
    // A forked child has the memory but not the threads, and a mutex may be locked indefinitely: hands off, never
    // destroyed.
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
