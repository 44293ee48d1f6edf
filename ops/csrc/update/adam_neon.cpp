// SPDX-License-Identifier: Apache-2.0

#include "adam_8bit.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <cstring>

namespace tencache {
namespace {

struct Vector {
    using Reg = float32x4_t;
    static constexpr std::size_t WIDTH = 4;
    static Reg load(const float* address) { return vld1q_f32(address); }
    static void store(float* address, Reg value) { vst1q_f32(address, value); }
    static Reg set(float value) { return vdupq_n_f32(value); }
    static Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
    static Reg sqrt(Reg a) { return vsqrtq_f32(a); }
    static Reg div(Reg a, Reg b) { return vdivq_f32(a, b); }
    static Reg add(Reg a, Reg b) { return vaddq_f32(a, b); }
    static Reg min(Reg a, Reg b) { return vminq_f32(a, b); }
    static Reg max(Reg a, Reg b) { return vmaxnmq_f32(a, b); }  // b, where a is not a number
    static Reg abs(Reg a) { return vabsq_f32(a); }
    static float largest(Reg a) { return vmaxvq_f32(a); }

    static Reg lookup(const float* table, const std::uint8_t* codes)
    {
        const float values[WIDTH] = {table[codes[0]], table[codes[1]], table[codes[2]], table[codes[3]]};
        return vld1q_f32(values);
    }
    static void store_codes(std::uint8_t* address, const std::uint8_t* table, Reg index)
    {
        std::uint16_t positions[WIDTH];
        vst1_u16(positions, vmovn_u32(vcvtq_u32_f32(index)));
        for (std::size_t i = 0; i < WIDTH; ++i) { address[i] = table[positions[i]]; }
    }

    static Reg load_bfloat16(const std::uint16_t* address)
    {
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(address), 16));
    }
    static void store_bfloat16(std::uint16_t* address, Reg value)
    {
        const uint32x4_t bits = vreinterpretq_u32_f32(value);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint16x4_t number = vmovn_u32(vceqq_f32(value, value));
        vst1_u16(address, vbsl_u16(number, rounded, vdup_n_u16(0xffff)));
    }
    static Reg load_float16(const std::uint16_t* address)
    {
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(address)));
    }
    static void store_float16(std::uint16_t* address, Reg value)
    {
        vst1_u16(address, vreinterpret_u16_f16(vcvt_f16_f32(value)));
    }
    static float float16_to_float(std::uint16_t half)
    {
        __fp16 value;
        std::memcpy(&value, &half, sizeof value);
        return static_cast<float>(value);
    }
    static std::uint16_t float_to_float16(float value)
    {
        const __fp16 half = static_cast<__fp16>(value);
        std::uint16_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        return bits;
    }
};

#include "adam_kernel.inc"
#include "split_master.inc"
#include "adam_8bit.inc"

}  // namespace

extern const AdamVariant adam_neon;
const AdamVariant adam_neon{
    adam_sweep, descent_sweep, split_adam_sweep, split_master, splits_exactly, join_master, blockwise_adam,
    split_blockwise_adam, round_master, "neon", Vector::WIDTH,
};

}  // namespace tencache

#endif
