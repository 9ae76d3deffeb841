#include "cpu.h"

namespace ggpipe {

CpuFeatures cpu_features() {
#ifdef __x86_64__
    const bool avx2 = __builtin_cpu_supports("x86-64-v3"), avx512 = __builtin_cpu_supports("x86-64-v4");
#ifdef GGPIPE_AVX_VNNI
    const bool avx_vnni = avx2 && __builtin_cpu_supports("avxvnni");
#else
    const bool avx_vnni = false;
#endif
    return {avx2, avx_vnni, avx512, avx512 && __builtin_cpu_supports("avx512vnni"),
            avx512 && __builtin_cpu_supports("avx512bf16")};
#else
    return {};
#endif
}

}  // namespace ggpipe
