// SPDX-License-Identifier: Apache-2.0
//
// One pass of Adam with 8-bit moments over a run of elements: each moment is a code of a map of 256 values, times the
// largest magnitude of its block of 256 consecutive elements of the sub-group.
//
// The result equals bitsandbytes' CPU kernel (_optimizer_update_8bit_blockwise_cpu, 0.50), which consists of passes of
// torch's and two of its own, followed by a rounding copy. One rounding per line:
//
//     g = g * scale                       a separate pass in DeepSpeed (unscale and clip)
//     m = map1[m] * m_scale;  v = map2[v] * v_scale
//     m = m * beta1;  m = fma(g, 1 - beta1, m)
//     v = v * beta2;  q = (1 - beta2) * g;  v = fma(q, g, v)
//     d = sqrt(v), as torch computes it;  d = d / correction2;  d = d + eps
//     p = p * (1 - lr * weight_decay)     with weight decay
//     u = step_size * m;  u = u / d;  p = p + u
//     m_scale = max |m|;  m = codes1[m * (1 / m_scale)];  the same for v
//     w = round(p)                        to nearest, ties to even
//
// tencache_ds compares both on the processor and with the versions at hand before it uses this one.

#pragma once

#include <cstddef>
#include <cstdint>

#include "adam.h"

namespace tencache {

inline constexpr std::size_t SCALE_NUMEL = 256;  // elements that share a scale

// All single precision, computed as bitsandbytes does (BlockwiseScalars in tencache_ds).
struct BlockwiseScalars {
    float scale;  // what gradients are multiplied by; exactly 1 skips the product
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float correction2;  // sqrt(1 - beta2^t)
    float eps;
    float step_size;    // -lr / (1 - beta1^t)
    bool decays;
    float decay;        // 1 - lr * weight_decay
};

// One moment's map, and the code of each of 65536 equidistant values from -1 to 1.
struct MomentMap {
    static constexpr std::size_t N_CODES = 65536;
    alignas(64) float values[256];
    std::uint8_t codes[N_CODES + 4];  // vectors read four bytes at a time
};

// vmsSqrt of Intel's Vector Mathematics, by which torch computes square roots on x86, not always the nearest value.
using SquareRoot = void (*)(int numel, const float* values, float* roots, std::int64_t mode);
inline constexpr std::int64_t SQUARE_ROOT_MODE = 0x140102;  // torch's: high accuracy, denormal numbers kept, no errors

// MKL_Set_Num_Threads_Local: sets the threads of a call of the above by this thread; returns the former number. With
// several, as torch.set_num_threads asks for, the 256 square roots of a block take 10 to 35 us, and 0.1 us otherwise.
using SetThreads = int (*)(int n_threads);

struct BlockwiseMaps {
    MomentMap first, second;
    SquareRoot square_root = nullptr;  // null: the nearest value
    SetThreads set_threads = nullptr;  // with square_root only
};

// A run of elements whose addresses are contiguous in every array. It begins where a scale does.
struct BlockwiseRun {
    float* master;                 // null: split, see split_master.inc
    std::uint8_t* first;
    float* first_scale;
    std::uint8_t* second;
    float* second_scale;
    const void* gradient;
    std::size_t numel;
    std::uint16_t* remainder = nullptr;  // of split master weights
    std::uint8_t* marks = nullptr;       // of these
};

}  // namespace tencache
