// SPDX-License-Identifier: Apache-2.0
//
// Requests to storage, carried out by a few lanes: threads that each own a kernel AIO context.
//
// A request is cut into blocks. Lanes take blocks from two queues, urgent first, submit them to the kernel, check the
// result of every one, continue short transfers, retry transient errors, and report each request once.
//
// [Note: latency of urgent requests]
// Requests submitted to the kernel cannot be withdrawn, so an urgent read waits for all background bytes that the
// device holds when it arrives. Their number, over all lanes, is therefore limited: to a quarter of background_nbytes
// while an urgent request is unfinished, to background_nbytes for a second after it, and to three times as much at
// quiet times, when some devices give more for a longer queue. So the first urgent read after a quiet time waits for
// longer than those that follow. Background is never starved: with both kinds waiting, every eighth block is
// background.
//
// [Note: files that do not do asynchronous I/O]
// On tmpfs, and on descriptors that go through the page cache, io_submit() itself moves the bytes and returns when they
// are there. Several lanes still work in parallel then, but a lane that submits many blocks at once would keep them
// from the others and make an urgent request wait. A lane that finds its blocks done when io_submit() returns therefore
// takes one at a time, and is under the limit on background only while an urgent request is unfinished: nothing queues
// up in a device there, and the lane is free again after one block. Such file systems let one writer at a time into a
// file, so such a lane takes no write to a file that another one is writing to: it would only wait, and keep a core
// busy with that. Writes to several files run in parallel, those to one file one after another.
//
// No function here touches Python. All of them may be called from any thread.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tencache {

enum class Operation : std::uint8_t { read = 0, write = 1 };
enum class Priority : std::uint8_t { urgent = 0, background = 1 };

struct QueueOptions {
    int n_lanes;
    std::int64_t block_nbytes;       // longest piece given to the kernel at once; a multiple of 4096
    int queue_depth;                 // blocks that the kernel has at a time, per lane
    std::int64_t background_nbytes;  // background bytes that the kernel has at a time; see the first note
};

struct Transfer {
    std::uint64_t id;  // chosen by the caller, not in use
    Operation operation;
    Priority priority;
    int fd;  // stays open until the request has ended
    std::int64_t offset;
    char* address;  // stays valid until the request has ended
    std::int64_t nbytes;
};

// The end of a request. Of several errors, the first is reported.
struct Completion {
    std::uint64_t id;
    int error;                  // errno; 0 on success and at the end of the file
    bool end_of_file;           // a read reached the end of the file before its own end
    bool in_flight;             // given up while the kernel still had a part of it: the buffer may still be used
    std::int64_t error_offset;  // the block that failed
    std::int64_t error_nbytes;
    std::int64_t nbytes_moved;  // of the whole request
};

struct QueueStats {
    std::int64_t nbytes[2];   // moved, by operation
    std::int64_t busy_ns[2];  // time with at least one block of the operation taken by a lane
    std::int64_t n_requests;  // neither ended nor given up
    std::int64_t n_short;     // transfers that were continued
    std::int64_t n_retries;   // after EAGAIN or EINTR
};

class IoQueue {
public:
    // Throws std::system_error with the errno of io_setup(), eventfd() or the thread's creation.
    explicit IoQueue(const QueueOptions& options);
    // Like close(), within a bound; in a forked child it only closes descriptors.
    ~IoQueue();
    IoQueue(const IoQueue&) = delete;
    IoQueue& operator=(const IoQueue&) = delete;

    // False when the queue is closed, or this is a forked child of the process that created it. Throws
    // std::invalid_argument for an id in use.
    bool submit(const Transfer& transfer);
    // Lets a request that failed before it could be submitted end like all others: by a completion.
    bool submit_failed(std::uint64_t id, int error);
    // Makes a request urgent, if it has not ended. False when it has.
    bool promote(std::uint64_t id);
    // Drops the blocks that the kernel does not have yet; the request ends with ECANCELED when the others have ended.
    // False when there are none: the request continues to its end.
    bool cancel(std::uint64_t id);
    // Ended requests, oldest first, each handed out once. Waits up to timeout_s for the first (negative: no limit).
    // Empty after a time-out, and always once closed() and all handed out.
    std::vector<Completion> collect(std::size_t max_n, double timeout_s);
    // Refuses new requests and waits up to timeout_s for all submitted; then drops what has not started, gives up what
    // has, and ends the lanes. drop_waiting: drops what has not started at once. Returns the number of requests given
    // up while the kernel still had them. Idempotent.
    int close(double timeout_s, bool drop_waiting);
    bool closed() const;
    QueueStats stats() const;

private:
    class Core;
    std::shared_ptr<Core> core_;
    pid_t pid_;
};

}  // namespace tencache
