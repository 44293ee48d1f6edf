// SPDX-License-Identifier: Apache-2.0
#include "state_file.h"

#include <errno.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>

namespace tencache {

namespace {

constexpr std::size_t PAGE_NBYTES = 4096;

std::size_t whole_pages(std::size_t nbytes) { return (nbytes + PAGE_NBYTES - 1) / PAGE_NBYTES * PAGE_NBYTES; }

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

// Grows to the largest block that the thread has had.
char* memory_of_thread(std::size_t nbytes)
{
    static thread_local std::unique_ptr<char, Free> memory;
    static thread_local std::size_t capacity = 0;
    if (nbytes > capacity) {
        memory.reset(static_cast<char*>(std::aligned_alloc(PAGE_NBYTES, nbytes)));
        capacity = memory == nullptr ? 0 : nbytes;
    }
    return memory.get();
}

template <class Transfer>
int whole_transfer(Transfer transfer, char* address, std::size_t nbytes, std::int64_t offset)
{
    while (nbytes > 0) {
        const ssize_t n = transfer(address, nbytes, offset);
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0) { return errno; }
        if (n == 0) { return EIO; }  // the file ends here
        address += n;
        nbytes -= static_cast<std::size_t>(n);
        offset += n;
    }
    return 0;
}

void note_words(std::uint64_t* words, std::size_t position, const char* pages, std::size_t nbytes)
{
    for (std::size_t page = 0; page < nbytes / PAGE_NBYTES; ++page) {
        std::memcpy(words + page, pages + page * PAGE_NBYTES + position * sizeof(std::uint64_t), sizeof(std::uint64_t));
    }
}

}  // namespace

int read_state(const StateFile& file, std::size_t first, std::size_t numel, StateBlock& block)
{
    std::size_t total_nbytes = 0;
    for (const std::size_t element_nbytes : file.element_nbytes) { total_nbytes += whole_pages(numel * element_nbytes); }
    char* memory = memory_of_thread(total_nbytes);
    if (memory == nullptr) { return ENOMEM; }
    for (std::size_t i = 0; i < block.kinds.size(); ++i) {
        const std::size_t nbytes = whole_pages(numel * file.element_nbytes[i]);
        const std::int64_t in_extent = file.pieces[i] + static_cast<std::int64_t>(first * file.element_nbytes[i]);
        block.kinds[i] = memory;
        const auto read = [&](char* address, std::size_t n, std::int64_t at) { return ::pread(file.fd, address, n, at); };
        if (const int error = whole_transfer(read, memory, nbytes, file.offset + in_extent)) { return error; }
        if (file.words_read != nullptr) {
            note_words(file.words_read + in_extent / PAGE_NBYTES, file.read_position, memory, nbytes);
        }
        memory += nbytes;
    }
    return 0;
}

int write_state(const StateFile& file, std::size_t first, std::size_t numel, const StateBlock& block)
{
    for (std::size_t i = 0; i < block.kinds.size(); ++i) {
        const std::size_t nbytes = whole_pages(numel * file.element_nbytes[i]);
        const std::int64_t in_extent = file.pieces[i] + static_cast<std::int64_t>(first * file.element_nbytes[i]);
        const auto write = [&](char* address, std::size_t n, std::int64_t at) { return ::pwrite(file.fd, address, n, at); };
        if (const int error = whole_transfer(write, block.kinds[i], nbytes, file.offset + in_extent)) { return error; }
        if (file.words_written != nullptr) {
            note_words(file.words_written + in_extent / PAGE_NBYTES, file.written_position, block.kinds[i], nbytes);
        }
    }
    return 0;
}

}  // namespace tencache
