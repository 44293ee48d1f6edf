// SPDX-License-Identifier: Apache-2.0
//
// A hash of 16-bit weights, to notice that something has changed them: not for adversaries. Each word is combined with
// what came before by an invertible step, so a change within one word always changes the result.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tencache {

inline std::uint64_t digest_step(std::uint64_t state, std::uint64_t word)
{
    constexpr std::uint64_t FACTOR = 0x9e3779b97f4a7c15u;  // odd
    return (((state << 23) | (state >> 41)) ^ word) * FACTOR;
}

// Of a run of weights that comes in parts: the same however it is divided.
class WeightsDigest {
public:
    void add(const std::uint16_t* weights, std::size_t numel)
    {
        numel_ += numel;
        if (n_pending_ > 0) {
            const std::size_t n = std::min(numel, STRIPE_NUMEL - n_pending_);
            std::copy(weights, weights + n, pending_ + n_pending_);
            n_pending_ += n;
            weights += n;
            numel -= n;
            if (n_pending_ < STRIPE_NUMEL) { return; }
            add_stripe(pending_);
            n_pending_ = 0;
        }
        for (; numel >= STRIPE_NUMEL; weights += STRIPE_NUMEL, numel -= STRIPE_NUMEL) { add_stripe(weights); }
        std::copy(weights, weights + numel, pending_);
        n_pending_ = numel;
    }

    std::uint64_t value() const
    {
        std::uint64_t result = numel_;
        for (std::size_t i = 0; i < n_pending_; ++i) { result = digest_step(result, pending_[i]); }
        for (const std::uint64_t each : state_) { result = digest_step(result ^ (result >> 32), each ^ (each >> 32)); }
        return result ^ (result >> 32);
    }

private:
    static constexpr std::size_t LANES = 4;  // independent of each other, for the processor's pipeline
    static constexpr std::size_t STRIPE_NUMEL = LANES * sizeof(std::uint64_t) / sizeof(std::uint16_t);

    void add_stripe(const std::uint16_t* weights)
    {
        std::uint64_t words[LANES];
        std::memcpy(words, weights, sizeof words);
        for (std::size_t lane = 0; lane < LANES; ++lane) { state_[lane] = digest_step(state_[lane], words[lane]); }
    }

    std::uint64_t state_[LANES] = {1, 2, 3, 4};
    std::uint16_t pending_[STRIPE_NUMEL] = {};
    std::size_t n_pending_ = 0;
    std::size_t numel_ = 0;
};

}  // namespace tencache
