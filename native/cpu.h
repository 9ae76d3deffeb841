// The features of CPUs by which kernels of our own are chosen.
#pragma once

namespace ggpipe {

struct CpuFeatures {
    bool avx2;         // with FMA and F16C, as all CPUs that have one have the others
    bool avx_vnni;     // dot products of bytes, in vectors of 256 bits
    bool avx512;       // with its instructions for bytes, 16-bit numbers and shorter vectors: Intel since Skylake-SP
    bool avx512_vnni;  // dot products of bytes, in vectors of 512 bits
    bool avx512_bf16;  // dot products of BF16 numbers: Intel since Cooper Lake, AMD since Zen 4
};
CpuFeatures cpu_features();  // of this CPU, and of the operating system, which has to save the vectors

}  // namespace ggpipe
