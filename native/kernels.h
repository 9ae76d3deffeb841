// What products.cpp needs to know of kernels for products of weights, and what all of them have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "ggml.h"

namespace ggpipe {

// The quantized types that there are kernels for, by their names in ggml: those that it may repack, others, and those with grids. A
// test may define shorter lists.
#ifndef GGPIPE_FOR_FORMATS
#define GGPIPE_FOR_REPACKED_FORMATS(DO) DO(Q4_0) DO(IQ4_NL) DO(MXFP4) DO(Q2_K) DO(Q4_K)
#define GGPIPE_FOR_FORMATS(DO) DO(Q8_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q3_K) DO(Q5_K) DO(Q6_K) DO(IQ4_XS) \
    DO(NVFP4) DO(Q1_0) DO(Q2_0) DO(TQ1_0) DO(TQ2_0) GGPIPE_FOR_REPACKED_FORMATS(DO)
#define GGPIPE_FOR_GRID_FORMATS(DO) DO(IQ2_XXS) DO(IQ2_XS) DO(IQ2_S) DO(IQ3_XXS) DO(IQ3_S) DO(IQ1_S) DO(IQ1_M)
#endif

// Both layouts of a format that is a template of how rows lie.
#define GGPIPE_LAYOUTS(NAME)        \
    using NAME = Any##NAME<Rows>;   \
    using Repacked##NAME = Any##NAME<Eights>;

constexpr int kChunk = 256;               // columns that are unpacked at a time
constexpr int kMaxUnits = 16;             // of a chunk; each has a scale
constexpr int kSpareRows = 1;             // of activations, after the last one: kernels may read them, whatever they hold
constexpr int kFewestForTwo = 24;         // rows of activations for which `multiply_two` is faster
constexpr size_t kAhead = 8 << 10;        // bytes between the next tile and what is fetched meanwhile

struct Weights {
    const uint8_t * data;
    int64_t n_rows;
    size_t row_bytes;
    const uint8_t * next;  // what is multiplied after them
};
struct Activations {  // quantized as a format of weights wants them: chunk by chunk, and in these row by row
    int64_t n_rows, n_columns, n_chunks;
    int8_t * numbers;        // of each row, as many bytes as the kernel says; with AVX2, this is all
    int32_t * starts;        // of each unit: what makes up for the offset of the weights' numbers
    float * scales, * sums;  // of each unit; a sum is that of its values
};

// Of 32 columns, the first of each `kStep` first, then the second of each, and so on.
template <int kStep> inline void interleave(int8_t * columns) {
    int8_t in_order[32];
    memcpy(in_order, columns, sizeof in_order);
    for (int i = 0; i < kStep; i++) {
        for (int j = 0; j < 32 / kStep; j++) columns[32 / kStep * i + j] = in_order[kStep * j + i];
    }
}

struct Kernel {
    const char * name;
    bool is_repacked;  // the layout of weights that it takes
    int n_lanes;       // rows of weights at a time
    int chunk_bytes;   // of the numbers of a chunk of activations
    void (*quantize)(const float * x, int64_t row, const Activations & to);
    // The results of `n_lanes` rows of weights, from `first` on, for `n` rows of activations, from `row` on.
    void (*multiply)(const Weights &, int64_t first, const Activations &, int64_t row, size_t n, float * const * to);
    // The same of twice as many rows of weights, where that is faster for many rows of activations; or nullptr.
    void (*multiply_two)(const Weights &, int64_t first, const Activations &, int64_t row, size_t n, float * const * to);
};
// nullptr: none.
const Kernel * avx512_vnni_kernel(ggml_type type, bool is_repacked);
const Kernel * avx_vnni_kernel(ggml_type type, bool is_repacked);
const Kernel * avx2_kernel(ggml_type type, bool is_repacked);
const Kernel * avx512_grid_kernel(ggml_type type);
const Kernel * avx2_grid_kernel(ggml_type type);
const Kernel * avx512_bf16_kernel(ggml_type type);
const Kernel * avx512_float_kernel(ggml_type type);
const Kernel * avx2_float_kernel(ggml_type type);
// The one for weights of this layout on a CPU with these features.
const Kernel * kernel_for(ggml_type type, bool is_repacked, const CpuFeatures & cpu);

}  // namespace ggpipe
