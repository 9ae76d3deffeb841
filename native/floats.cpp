// Kernels for products of weights in floating point with AVX2; see products.cpp.
//
// ggml adds in one order for a single row and in another for several, so near-ties, such as those of a router between experts,
// may be decided differently in runs with draft tokens. Here each result has eight partial sums, each of every eighth column,
// through all columns, and these are added up at the end. Activations are rounded to the weights' type, as in ggml.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "quads.h"

namespace ggpipe {

#ifdef __x86_64__
namespace avx2 {
namespace {

constexpr int kNumberBytes = kChunk * sizeof(float);  // of a chunk of activations

struct F32 {
    using Number = float;
    GGPIPE_AVX2 GGPIPE_INLINE static F widened(const Number * from) { return _mm256_loadu_ps(from); }
    GGPIPE_AVX2 GGPIPE_INLINE static F rounded(F x) { return x; }
};
struct F16 {
    using Number = uint16_t;
    GGPIPE_AVX2 GGPIPE_INLINE static F widened(const Number * from) { return _mm256_cvtph_ps(load_16(from)); }
    GGPIPE_AVX2 GGPIPE_INLINE static F rounded(F x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
};
struct BF16 {
    using Number = uint16_t;
    GGPIPE_AVX2 GGPIPE_INLINE static F widened(const Number * from) {
        return (F) _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(from)), 16);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static F rounded(F x) {  // to nearest, ties to even; what is not a number stays that
        const V bits = (V) x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const V nearest = sum_of(bits, sum_of(odd, _mm256_set1_epi32(0x7fff)));
        const F upper = (F) _mm256_and_si256(nearest, _mm256_set1_epi32(int(0xffff0000)));
        return _mm256_blendv_ps(upper, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
};

template <class Type> GGPIPE_AVX2 void round_row(const float * x, int64_t row, const Activations & a) {
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++, x += kChunk) {
        float * to = (float *) (a.numbers + (chunk * a.n_rows + row) * kNumberBytes);
        const int n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        memcpy(to, x, n * sizeof *to);
        std::fill(to + n, to + kChunk, 0.0f);  // the rest adds nothing
        for (int i = 0; i < n; i += kLanes) _mm256_storeu_ps(to + i, Type::rounded(_mm256_loadu_ps(to + i)));
    }
}

// Adds products with a chunk to the sums of `kOutputs` rows of weights by `kRows` rows of activations. `weight` reads eight
// numbers of a row of weights; sums of a row of activations are `kLanes` vectors.
template <int kOutputs, int kRows, class Weight>
GGPIPE_AVX2 GGPIPE_INLINE inline void add(const Weight & weight, const float * const * x, F * sums) {
    F total[kOutputs][kRows];
    for (int o = 0; o < kOutputs; o++) {
        for (int r = 0; r < kRows; r++) total[o][r] = sums[r * kLanes + o];
    }
    _Pragma("GCC unroll 1") for (int i = 0; i < kChunk; i += kLanes) {
        F numbers[kRows];
        for (int r = 0; r < kRows; r++) numbers[r] = _mm256_loadu_ps(x[r] + i);
        for (int o = 0; o < kOutputs; o++) {
            const F w = weight(o, i);
            for (int r = 0; r < kRows; r++) total[o][r] = _mm256_fmadd_ps(w, numbers[r], total[o][r]);
        }
    }
    for (int o = 0; o < kOutputs; o++) {
        for (int r = 0; r < kRows; r++) sums[r * kLanes + o] = total[o][r];
    }
}

GGPIPE_AVX2 GGPIPE_INLINE inline float sum_of_lanes(F x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <class Type> GGPIPE_AVX2 void multiply(const Weights & weights, int64_t first, const Activations & a,
                                               const std::vector<int32_t> & rows, float * const * to) {
    using Number = typename Type::Number;
    struct alignas(32) Line { float sums[kLanes][kLanes]; };  // of a row of activations: eight by each row of weights
    static thread_local std::vector<Line> lines;
    lines.assign(rows.size(), Line{});
    F * sums = (F *) lines.data();
    constexpr int kBytes = kChunk * sizeof(Number);
    alignas(32) float tile[kLanes][kChunk];
    alignas(32) Number copies[kLanes][kChunk];  // where there are not enough rows or columns for a tile
    const int n_rows = std::min<int64_t>(kLanes, weights.n_rows - first);
    // Into the second cache, in the order of their addresses: a later tile.
    const size_t n_bytes = weights.n_rows * weights.row_bytes, at = (first + kLanes) * weights.row_bytes + kAhead;
    const uint8_t * ahead = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++, ahead += kLanes * kBytes) {
        const int n_columns = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        const uint8_t * data = weights.data + first * weights.row_bytes + chunk * kBytes;
        size_t stride = weights.row_bytes;
        if (n_columns < kChunk || n_rows < kLanes) {
            memset(copies, 0, sizeof copies);
            for (int i = 0; i < n_rows; i++) memcpy(copies[i], data + i * stride, n_columns * sizeof(Number));
            data = (const uint8_t *) copies;
            stride = kBytes;
        }
        const auto read = [&](int o, int i) GGPIPE_AVX2 GGPIPE_INLINE {
            if (o == 0) {
                for (int j = 0; j < kLanes * kLanes * int(sizeof(Number)); j += 64) __builtin_prefetch(ahead + i * kLanes * sizeof(Number) + j, 0, 2);
            }
            return Type::widened((const Number *) (data + o * stride) + i);
        };
        const float * x[3];
        const auto take = [&](size_t row, int n) GGPIPE_AVX2 GGPIPE_INLINE {
            for (int r = 0; r < n; r++) x[r] = (const float *) (a.numbers + (chunk * a.n_rows + rows[row + r]) * kNumberBytes);
        };
        if (rows.size() == 1) {
            take(0, 1);
            add<kLanes, 1>(read, x, sums);
            continue;
        }
        for (int i = 0; i < kChunk; i += kLanes) {
            for (int o = 0; o < kLanes; o++) _mm256_store_ps(tile[o] + i, read(o, i));
        }
        const auto lower = [&](int o, int i) GGPIPE_AVX2 GGPIPE_INLINE { return _mm256_load_ps(tile[o] + i); };
        const auto upper = [&](int o, int i) GGPIPE_AVX2 GGPIPE_INLINE { return _mm256_load_ps(tile[kLanes / 2 + o] + i); };
        const auto add_rows = [&](size_t row, auto count) GGPIPE_AVX2 GGPIPE_INLINE {
            take(row, count());
            add<kLanes / 2, count()>(lower, x, sums + row * kLanes);
            add<kLanes / 2, count()>(upper, x, sums + row * kLanes + kLanes / 2);
        };
        size_t row = 0;
        for (; row + 3 <= rows.size(); row += 3) add_rows(row, std::integral_constant<int, 3>());
        if (row + 2 == rows.size()) add_rows(row, std::integral_constant<int, 2>());
        if (row + 1 == rows.size()) add_rows(row, std::integral_constant<int, 1>());
    }
    for (size_t row = 0; row < rows.size(); row++) {
        for (int o = 0; o < n_rows; o++) to[row][first + o] = sum_of_lanes(sums[row * kLanes + o]);
    }
}

}  // namespace
}  // namespace avx2
#endif

const Kernel * float_kernel([[maybe_unused]] ggml_type type) {
#ifdef __x86_64__
    using namespace avx2;
    static const bool can = __builtin_cpu_supports("x86-64-v3");
    // With AVX-512, ggml's kernels for many rows of 16-bit numbers are faster than these.
    static const bool can_halves = can && !__builtin_cpu_supports("x86-64-v4");
    static constexpr Kernel of_f32{false, kLanes, kNumberBytes, round_row<F32>, multiply<F32>};
    static constexpr Kernel of_f16{false, kLanes, kNumberBytes, round_row<F16>, multiply<F16>};
    static constexpr Kernel of_bf16{false, kLanes, kNumberBytes, round_row<BF16>, multiply<BF16>};
    switch (type) {
        case GGML_TYPE_F32: return can ? &of_f32 : nullptr;
        case GGML_TYPE_F16: return can_halves ? &of_f16 : nullptr;
        case GGML_TYPE_BF16: return can_halves ? &of_bf16 : nullptr;
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
