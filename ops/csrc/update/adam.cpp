// SPDX-License-Identifier: Apache-2.0

#include "adam.h"

#include <cstring>
#include <initializer_list>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tencache {

#if defined(__x86_64__)
extern const AdamVariant adam_avx512;
extern const AdamVariant adam_avx2;
#elif defined(__aarch64__)
extern const AdamVariant adam_neon;
#endif

std::size_t element_nbytes(ElementType type)
{
    switch (type) {
        case ElementType::none: return 0;
        case ElementType::float32: return 4;
        case ElementType::bfloat16: return 2;
        case ElementType::float16: return 2;
    }
    return 0;
}

AdamVariant adam_variant(const char* name)
{
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 =
        avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (avx512 && std::strcmp(name, adam_avx512.name) == 0) { return adam_avx512; }
    if (avx2 && std::strcmp(name, adam_avx2.name) == 0) { return adam_avx2; }
#elif defined(__aarch64__)
    if (std::strcmp(name, adam_neon.name) == 0) { return adam_neon; }
#endif
    return AdamVariant{};
}

AdamVariant adam_variant()
{
#if defined(__aarch64__) && defined(__linux__)
    // There DeepSpeed's op is built for SVE, whose loops have no scalar tail and other contractions.
    if (getauxval(AT_HWCAP) & HWCAP_SVE) { return AdamVariant{}; }
#endif
    for (const char* name : {"avx512", "avx2", "neon"}) {
        const AdamVariant variant = adam_variant(name);
        if (variant.kernel != nullptr) { return variant; }
    }
    return AdamVariant{};
}

}  // namespace tencache
