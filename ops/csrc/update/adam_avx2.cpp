// SPDX-License-Identifier: Apache-2.0

#include "adam_8bit.h"

#if defined(__x86_64__)
#include <cstring>
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace tencache {
namespace {

struct Vector {
    using Reg = __m256;
    static constexpr std::size_t WIDTH = 8;
    static Reg load(const float* address) { return _mm256_loadu_ps(address); }
    static void store(float* address, Reg value) { _mm256_storeu_ps(address, value); }
    static Reg set(float value) { return _mm256_set1_ps(value); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }
    static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }  // b, where one of them is NaN; max too
    static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
    static Reg abs(Reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static float largest(Reg a)
    {
        __m128 most = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
    }

    static Reg lookup(const float* table, const std::uint8_t* codes)
    {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
        return _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(bytes), 4);
    }
    static void store_codes(std::uint8_t* address, const std::uint8_t* table, Reg index)
    {
        const __m256i positions = _mm256_and_si256(_mm256_cvttps_epi32(index), _mm256_set1_epi32(0xffff));
        __m256i codes = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), positions, 1);
        codes = _mm256_and_si256(codes, _mm256_set1_epi32(0xff));
        const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(address), _mm_packus_epi16(halves, halves));
    }

    static Reg load_bfloat16(const std::uint16_t* address)
    {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static void store_bfloat16(std::uint16_t* address, Reg value)
    {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0xffff), nan);
        const __m128i low = _mm256_castsi256_si128(result), high = _mm256_extracti128_si256(result, 1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(address), _mm_packus_epi32(low, high));
    }
    static Reg load_float16(const std::uint16_t* address)
    {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
    }
    static void store_float16(std::uint16_t* address, Reg value)
    {
        const __m128i halves = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(address), halves);
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

extern const AdamVariant adam_avx2;
const AdamVariant adam_avx2{
    adam_sweep, descent_sweep, split_adam_sweep, split_master, splits_exactly, join_master, blockwise_adam,
    split_blockwise_adam, round_master, "avx2", Vector::WIDTH,
};

}  // namespace tencache

#pragma GCC pop_options
#endif
