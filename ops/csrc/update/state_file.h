// SPDX-License-Identifier: Apache-2.0
//
// State of a chunk in a file in memory, where every transfer is a copy by the calling thread. One thread reads a block,
// updates it and writes it back: the block stays in that thread's cache, so the bytes cross the memory bus twice instead
// of six times, and no other thread has to be woken.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tencache {

// A place in a file, and the words that tell what was read and written there. Pieces begin at page boundaries.
struct StateFile {
    int fd;
    std::int64_t offset;                     // of the chunk's extent in the file
    std::array<std::int64_t, 3> pieces;      // in the extent: master weights or their remainders, exp_avg, exp_avg_sq
    std::array<std::size_t, 3> element_nbytes;  // of these kinds
    // Per page of the extent, the word at a position as read, and at another one as written; null: not wanted.
    std::uint64_t* words_read;
    std::size_t read_position;
    std::uint64_t* words_written;
    std::size_t written_position;
};

// Of each kind of state the elements of a block. Memory of the calling thread, valid until its next block.
struct StateBlock {
    std::array<char*, 3> kinds;
};

// Reads `numel` elements from element `first`, which is a multiple of 4096, with the rest of the last page. 0 or an errno.
int read_state(const StateFile& file, std::size_t first, std::size_t numel, StateBlock& block);

// Writes them back. 0 or an errno.
int write_state(const StateFile& file, std::size_t first, std::size_t numel, const StateBlock& block);

}  // namespace tencache
