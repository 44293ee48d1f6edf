// SPDX-License-Identifier: Apache-2.0
//
// One pass of Adam over a run of elements: gradient x scale -> moments and master weight -> 16-bit weight.
//
// The result equals DeepSpeed's CPU Adam (deepspeed/ops/csrc/adam/cpu_adam_impl.cpp, 0.19.8) followed by a rounding copy,
// bit for bit. Its vector loop does, with one rounding per line:
//
//     g = g * scale                       a separate pass in DeepSpeed (unscale and clip)
//     g = fma(p, weight_decay, g)         L2 mode with weight decay
//     m = m * beta1;  m = fma(g, 1 - beta1, m)
//     v = v * beta2;  q = g * g;  v = fma(q, 1 - beta2, v)
//     u = m / fma(sqrt(v), bias_correction2, eps)
//     p = fma(p, -lr * weight_decay, p)   AdamW with weight decay
//     p = fma(u, step_size, p)
//     w = round(p)                        to nearest, ties to even
//
// The elements left over by its widest vector (numel % 16 with AVX-512, % 8 with AVX2, % 4 with NEON, at the end of a
// sub-group) go through a scalar loop, which GCC contracts differently: see Arithmetic::tail in adam_kernel.inc.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tencache {

// GCC fuses the first of two products into the sum, across statements; Clang fuses within a statement only, which gives
// the vector loop's order. DeepSpeed's op and this one have the same compiler.
#if defined(__clang__)
constexpr bool TAIL_CONTRACTED = false;
#else
constexpr bool TAIL_CONTRACTED = true;
#endif

enum class ElementType : int { none = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

std::size_t element_nbytes(ElementType type);

enum class WeightDecay : int { none = 0, l2 = 1, decoupled = 2 };

// All single precision, computed as DeepSpeed does (AdamScalars in tencache_ds).
struct AdamScalars {
    float scale;               // what gradients are multiplied by; exactly 1 skips the product
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float bias_correction2;    // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;           // -lr / (1 - beta1^t)
    WeightDecay weight_decay;
    float decay;               // l2: weight_decay; decoupled: -lr * weight_decay
};

// A step along the gradient: g = g * scale;  p = p * retained;  p = fma(g, step, p);  w = round(p). It equals torch's
// p.mul_(retained).add_(g, alpha=step) in single precision, whose loops are contracted like that, and the rounding copy.
struct DescentScalars {
    float scale;     // what gradients are multiplied by; exactly 1 skips the product
    float retained;  // 1 - lr * weight_decay
    float step;      // -lr
};

// A run of elements whose addresses are contiguous in every array.
struct AdamRun {
    float* master;             // null: split, see split_master.inc; then the weight is bfloat16 and holds the old value
    std::uint16_t* remainder;  // of split master weights
    float* exp_avg;
    float* exp_avg_sq;
    const void* gradient;      // null: all zeros
    void* weight;              // null: no rounded weight needed
    std::size_t numel;
    std::size_t n_tail;        // number of elements at the end that are a sub-group's scalar tail
};

// The bits of a float, as an integer.
using FloatBits = std::uint32_t __attribute__((may_alias));

// A run of master weights that become split, or have been.
struct MasterRun {
    FloatBits* master;
    std::uint16_t* remainder;
    const std::uint16_t* weight;  // bits of bfloat16
    FloatBits* exp_avg_sq;        // whose signs mark elements; null: marks do, where moments have no sign to spare
    std::size_t numel;
    std::uint8_t* marks = nullptr;  // a bit an element, the lowest first
};

struct AdamTypes {
    ElementType gradient;
    ElementType weight;
};

using AdamKernel = void (*)(const AdamScalars&, const AdamTypes&, const AdamRun&);
using DescentKernel = void (*)(const DescentScalars&, const AdamTypes&, const AdamRun&);  // without moments

// With 8-bit moments: adam_8bit.h.
struct BlockwiseScalars;
struct BlockwiseMaps;
struct BlockwiseRun;
using BlockwiseKernel = void (*)(const BlockwiseScalars&, const BlockwiseMaps&, ElementType gradient, const BlockwiseRun&);
using SplitBlockwiseKernel = void (*)(const BlockwiseScalars&, const BlockwiseMaps&, ElementType gradient,
                                      const BlockwiseRun&, std::uint16_t* weight);

struct AdamVariant {
    AdamKernel kernel = nullptr;        // null where this processor has no vectors that DeepSpeed would use
    DescentKernel descent = nullptr;
    AdamKernel split_kernel = nullptr;  // of Adam, on split master weights
    void (*split)(MasterRun) = nullptr;
    bool (*splits_exactly)(MasterRun) = nullptr;  // whether nothing would be lost; changes nothing
    void (*join)(MasterRun) = nullptr;
    BlockwiseKernel blockwise = nullptr;
    SplitBlockwiseKernel split_blockwise = nullptr;  // rounds into the bfloat16 weights as well
    void (*round)(ElementType weight_type, const float* master, void* weight, std::size_t numel) = nullptr;
    const char* name = "none";
    std::size_t width = 1;  // elements per vector; the remainder is the scalar tail of DeepSpeed's op
};

// The widest variant of this processor, the one that DeepSpeed's builder chooses.
AdamVariant adam_variant();

// A named one ("avx512", "avx2", "neon"), for tests; its kernel is null where the processor or the build lacks it.
AdamVariant adam_variant(const char* name);

}  // namespace tencache
