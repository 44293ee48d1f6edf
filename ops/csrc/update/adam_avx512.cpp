// SPDX-License-Identifier: Apache-2.0

#include "adam_8bit.h"

#if defined(__x86_64__)
#include <cstring>
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")

namespace tencache {
namespace {

struct Vector {
    using Reg = __m512;
    static constexpr std::size_t WIDTH = 16;
    static Reg load(const float* address) { return _mm512_loadu_ps(address); }
    static void store(float* address, Reg value) { _mm512_storeu_ps(address, value); }
    static Reg set(float value) { return _mm512_set1_ps(value); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }
    static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }  // b, where one of them is NaN; max too
    static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
    static Reg abs(Reg a) { return _mm512_abs_ps(a); }
    static float largest(Reg a) { return _mm512_reduce_max_ps(a); }

    static Reg lookup(const float* table, const std::uint8_t* codes)
    {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), table, 4);
    }
    static void store_codes(std::uint8_t* address, const std::uint8_t* table, Reg index)
    {
        const __m512i positions = _mm512_and_si512(_mm512_cvttps_epi32(index), _mm512_set1_epi32(0xffff));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(address), _mm512_cvtepi32_epi8(_mm512_i32gather_epi32(positions, table, 1)));
    }

    static Reg load_bfloat16(const std::uint16_t* address)
    {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static void store_bfloat16(std::uint16_t* address, Reg value)
    {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        const __m512i result = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0xffff));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), _mm512_cvtepi32_epi16(result));
    }
    static Reg load_float16(const std::uint16_t* address)
    {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
    }
    static void store_float16(std::uint16_t* address, Reg value)
    {
        const __m256i halves = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), halves);
    }
    static float float16_to_float(std::uint16_t half) { return _cvtsh_ss(half); }
    static std::uint16_t float_to_float16(float value)
    {
        return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

#include "adam_kernel.inc"
#include "split_master.inc"
#include "adam_8bit.inc"

}  // namespace

extern const AdamVariant adam_avx512;
const AdamVariant adam_avx512{
    adam_sweep, descent_sweep, split_adam_sweep, split_master, splits_exactly, join_master, blockwise_adam,
    split_blockwise_adam, round_master, "avx512", Vector::WIDTH,
};

}  // namespace tencache

#pragma GCC pop_options
#endif
