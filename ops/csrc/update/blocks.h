// SPDX-License-Identifier: Apache-2.0
//
// A chunk in blocks, however its runs divide it: the unit of the team's work, and of the digests of the weights that split
// master weights are split over. Addresses come from Python as integers.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "adam.h"
#include "weights_digest.h"

namespace tencache {

// 28 bytes an element: a block is about 1 MiB of traffic, 0.1 to 0.3 ms of one core.
inline constexpr std::size_t BLOCK_NUMEL = 32768;

// Elements from a position in the chunk to the end of its block, or of the run, of which so many are left.
inline std::size_t part_numel(std::size_t position, std::size_t left)
{
    return std::min(BLOCK_NUMEL - position % BLOCK_NUMEL, left);
}

// master or remainder, exp_avg, exp_avg_sq, gradient (0: zeros), weight (0: not wanted), numel
using RunTuple =
    std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t>;

inline void check_state(const std::vector<RunTuple>& runs)
{
    for (const auto& [master, exp_avg, exp_avg_sq, gradient, weight, numel] : runs) {
        if (master == 0 || exp_avg == 0 || exp_avg_sq == 0) { throw std::invalid_argument("a run has no address"); }
    }
}

inline std::vector<AdamRun> cut_blocks(const std::vector<RunTuple>& runs,
                                       const AdamTypes& types,
                                       std::size_t n_tail,
                                       bool split)
{
    if (split && types.weight != ElementType::bfloat16) {
        throw std::invalid_argument("split master weights are those of bfloat16 weights");
    }
    std::size_t numel = 0;
    for (const RunTuple& run : runs) { numel += std::get<5>(run); }
    if (n_tail > numel) { throw std::invalid_argument("the tail is longer than all runs together"); }
    const std::size_t body_end = numel - n_tail;
    std::vector<AdamRun> blocks;
    std::size_t position = 0;
    for (const RunTuple& run : runs) {
        const auto [master, exp_avg, exp_avg_sq, gradient, weight, run_numel] = run;
        if (split && weight == 0) { throw std::invalid_argument("a run of split master weights has no weights"); }
        for (std::size_t start = 0, length; start < run_numel; start += length) {
            length = part_numel(position + start, run_numel - start);
            const std::size_t end = position + start + length;
            const std::size_t tail = end > body_end ? std::min(length, end - body_end) : 0;
            blocks.push_back(AdamRun{
                split ? nullptr : reinterpret_cast<float*>(master) + start,
                split ? reinterpret_cast<std::uint16_t*>(master) + start : nullptr,
                reinterpret_cast<float*>(exp_avg) + start,
                reinterpret_cast<float*>(exp_avg_sq) + start,
                gradient == 0 ? nullptr
                              : reinterpret_cast<const char*>(gradient) + start * element_nbytes(types.gradient),
                weight == 0 ? nullptr : reinterpret_cast<char*>(weight) + start * element_nbytes(types.weight),
                length,
                tail,
            });
        }
        position += run_numel;
    }
    return blocks;
}

// first element in the chunk, weight, numel; ascending
using WeightTuple = std::tuple<std::size_t, std::uintptr_t, std::size_t>;

struct WeightPart {
    std::size_t start;  // in the chunk
    void* weight;
    std::size_t numel;
};

// Of each block of a chunk, the parts of weights that it has elements of.
inline std::vector<std::vector<WeightPart>> cut_blocks(const std::vector<WeightTuple>& weights,
                                                       std::size_t numel,
                                                       std::size_t weight_nbytes)
{
    std::vector<std::vector<WeightPart>> blocks((numel + BLOCK_NUMEL - 1) / BLOCK_NUMEL);
    for (const auto& [first, weight, weight_numel] : weights) {
        if (weight == 0 || weight_numel > numel || first > numel - weight_numel) {
            throw std::invalid_argument("a weight has no address, or is not in the chunk");
        }
        for (std::size_t start = 0, length; start < weight_numel; start += length) {
            length = part_numel(first + start, weight_numel - start);
            blocks[(first + start) / BLOCK_NUMEL].push_back(
                {first + start, reinterpret_cast<char*>(weight) + start * weight_nbytes, length});
        }
    }
    return blocks;
}

// Of split master weights, weights of all elements are needed.
inline void check_covered(const std::vector<std::vector<WeightPart>>& blocks, std::size_t numel, ElementType weight_type)
{
    if (weight_type != ElementType::bfloat16) {
        throw std::invalid_argument("split master weights are those of bfloat16 weights");
    }
    for (const auto& block : blocks) {
        for (const WeightPart& part : block) { numel -= part.numel; }
    }
    if (numel != 0) { throw std::invalid_argument("an element of split master weights has no weight"); }
}

// The bfloat16 weights of a block, one behind the other: those themselves, or a copy of several.
class ContiguousWeights {
public:
    ContiguousWeights(const std::vector<WeightPart>& parts, std::size_t numel) : parts_(parts)
    {
        if (parts.size() == 1) { return; }
        copy_.resize(numel);
        move([](std::uint16_t* copy, void* weight, std::size_t nbytes) { std::memcpy(copy, weight, nbytes); });
    }

    std::uint16_t* values() { return copy_.empty() ? static_cast<std::uint16_t*>(parts_.front().weight) : copy_.data(); }

    void write_back()
    {
        if (copy_.empty()) { return; }
        move([](std::uint16_t* copy, void* weight, std::size_t nbytes) { std::memcpy(weight, copy, nbytes); });
    }

private:
    template <class Function>
    void move(Function function)
    {
        std::size_t position = 0;
        for (const WeightPart& part : parts_) {
            function(copy_.data() + position, part.weight, part.numel * sizeof(std::uint16_t));
            position += part.numel;
        }
    }

    const std::vector<WeightPart>& parts_;
    std::vector<std::uint16_t> copy_;
};

// The parts of each block of the chunk, however its runs divide it: what its digests are of.
template <class Part>
std::vector<std::vector<Part>> by_block(const std::vector<Part>& parts)
{
    std::vector<std::vector<Part>> blocks;
    std::size_t position = 0;
    for (const Part& part : parts) {
        if (position % BLOCK_NUMEL == 0) { blocks.emplace_back(); }
        blocks.back().push_back(part);
        position += part.numel;
    }
    return blocks;
}

template <class Part>
std::uint64_t digest_of(const std::vector<Part>& parts)
{
    WeightsDigest digest;
    for (const Part& part : parts) { digest.add(static_cast<const std::uint16_t*>(part.weight), part.numel); }
    return digest.value();
}

using Blocks = std::vector<std::vector<AdamRun>>;

// master, remainder, weight, exp_avg_sq, numel
using MasterTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t>;

// With an address of marks, those of one run, which has no exp_avg_sq then.
inline std::vector<MasterRun> cut_blocks(const std::vector<MasterTuple>& runs, std::uintptr_t marks)
{
    std::vector<MasterRun> blocks;
    if (marks != 0 && runs.size() != 1) { throw std::invalid_argument("marks are those of one run"); }
    for (const MasterTuple& run : runs) {
        const auto [master, remainder, weight, exp_avg_sq, run_numel] = run;
        if (master == 0 || remainder == 0 || weight == 0 || (exp_avg_sq == 0) != (marks != 0)) {
            throw std::invalid_argument("a run has no address");
        }
        for (std::size_t start = 0; start < run_numel; start += BLOCK_NUMEL) {
            blocks.push_back(MasterRun{
                reinterpret_cast<FloatBits*>(master) + start,
                reinterpret_cast<std::uint16_t*>(remainder) + start,
                reinterpret_cast<const std::uint16_t*>(weight) + start,
                exp_avg_sq == 0 ? nullptr : reinterpret_cast<FloatBits*>(exp_avg_sq) + start,
                std::min(BLOCK_NUMEL, run_numel - start),
                marks == 0 ? nullptr : reinterpret_cast<std::uint8_t*>(marks) + start / 8,
            });
        }
    }
    return blocks;
}

struct WeightRun {
    const std::uint16_t* weight;
    std::size_t numel;
};

// Of an update of split master weights, by block: digests of the weights that they are split over.
struct Digests {
    std::vector<std::uint64_t> before;  // expected; empty: not compared
    std::vector<std::uint64_t> after;
    std::atomic<bool> match{true};
};

// Whether the weights of a block are those that its master weights are split over; notes it if not. Without them the
// master weights are lost: nothing is made of others.
template <class Part>
bool has_expected_weights(Digests& digests, std::size_t index, const std::vector<Part>& block)
{
    if (digests.before.empty() || digest_of(block) == digests.before[index]) { return true; }
    digests.match = false;
    return false;
}

inline std::vector<std::uint64_t> digests_of(const std::string& bytes)
{
    std::vector<std::uint64_t> result(bytes.size() / sizeof(std::uint64_t));
    std::memcpy(result.data(), bytes.data(), result.size() * sizeof(std::uint64_t));
    return result;
}

inline std::shared_ptr<Digests> digests_for(const std::string& expected, std::size_t n_blocks)
{
    if (!expected.empty() && expected.size() != n_blocks * sizeof(std::uint64_t)) {
        throw std::invalid_argument("the digest is of another number of weights");
    }
    auto digests = std::make_shared<Digests>();
    digests->before = digests_of(expected);
    digests->after.resize(n_blocks);
    return digests;
}

}  // namespace tencache
