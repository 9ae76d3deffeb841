// Kernels for products of weights in floating point with AVX2; see products.cpp.
//
// ggml adds in one order for a single row and in another for several, so near-ties, such as those of a router between experts,
// may be decided differently in runs with draft tokens. Here each result has eight partial sums, each of every eighth column,
// through all columns, and these are added up at the end. Activations are rounded to the weights' type, as in ggml.
#include <algorithm>
#include <cstring>
#include <type_traits>
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

// Some chunks of eight rows of weights.
template <class Number> struct Piece {
    const uint8_t * data;
    size_t stride;
    int64_t chunk;  // the first
    int n_chunks;
    const uint8_t * ahead;  // what to fetch meanwhile
};

// Adds products with a piece to the sums of `kOutputs` of its rows by `kRows` rows of activations, which have `kLanes` sums each.
template <class Type, int kOutputs, int kRows, bool kFetches>
GGPIPE_AVX2 GGPIPE_INLINE inline void add(const Piece<typename Type::Number> & piece, int first, const Activations & a,
                                         const int32_t * rows, F * sums) {
    using Number = typename Type::Number;
    constexpr int kStep = kLanes * kLanes * sizeof(Number);  // bytes of eight columns
    F total[kOutputs][kRows];
    for (int o = 0; o < kOutputs; o++) {
        for (int r = 0; r < kRows; r++) total[o][r] = sums[r * kLanes + first + o];
    }
    const Number * weights = (const Number *) (piece.data + first * piece.stride);
    const uint8_t * ahead = piece.ahead + first / kOutputs * piece.n_chunks * kChunk / kLanes * kStep * kOutputs / kLanes;
    for (int chunk = 0; chunk < piece.n_chunks; chunk++) {
        const float * x[kRows];
        for (int r = 0; r < kRows; r++) x[r] = (const float *) (a.numbers + ((piece.chunk + chunk) * a.n_rows + rows[r]) * kNumberBytes);
        _Pragma("GCC unroll 1") for (int i = 0; i < kChunk; i += kLanes, weights += kLanes) {
            F numbers[kRows];
            for (int r = 0; r < kRows; r++) numbers[r] = _mm256_loadu_ps(x[r] + i);
            if constexpr (kFetches) {
                for (int at = 0; at < kStep * kOutputs / kLanes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
                ahead += kStep * kOutputs / kLanes;
            }
            for (int o = 0; o < kOutputs; o++) {
                const F w = Type::widened((const Number *) ((const uint8_t *) weights + o * piece.stride));
                for (int r = 0; r < kRows; r++) total[o][r] = _mm256_fmadd_ps(w, numbers[r], total[o][r]);
            }
        }
    }
    for (int o = 0; o < kOutputs; o++) {
        for (int r = 0; r < kRows; r++) sums[r * kLanes + first + o] = total[o][r];
    }
}
template <class Type, int kRows, bool kFetches>
GGPIPE_AVX2 GGPIPE_INLINE inline void add_rows(const Piece<typename Type::Number> & piece, const Activations & a, const int32_t * rows, F * sums) {
    if constexpr (kRows == 1) {
        add<Type, kLanes, 1, kFetches>(piece, 0, a, rows, sums);
    } else {
        add<Type, kLanes / 2, kRows, kFetches>(piece, 0, a, rows, sums);
        add<Type, kLanes / 2, kRows, kFetches>(piece, kLanes / 2, a, rows, sums);
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
    constexpr int kBytes = kChunk * sizeof(Number), kChunks = 4;
    alignas(32) Number copies[kLanes][kChunk];  // where there are not enough rows or columns
    const int n_rows = std::min<int64_t>(kLanes, weights.n_rows - first);
    // Into the second cache, in the order of their addresses: a later tile.
    const size_t n_bytes = weights.n_rows * weights.row_bytes, at = (first + kLanes) * weights.row_bytes + kAhead;
    const uint8_t * ahead = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    for (int64_t chunk = 0, n_chunks; chunk < a.n_chunks; chunk += n_chunks) {
        const int64_t n_whole = n_rows == kLanes ? a.n_columns / kChunk - chunk : 0;
        n_chunks = std::clamp<int64_t>(n_whole, 1, kChunks);
        const uint8_t * data = weights.data + first * weights.row_bytes + chunk * kBytes;
        Piece<Number> piece{data, weights.row_bytes, chunk, int(n_chunks), ahead + chunk * kLanes * kBytes};
        if (n_whole <= 0) {
            memset(copies, 0, sizeof copies);
            const size_t n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk) * sizeof(Number);
            for (int i = 0; i < n_rows; i++) memcpy(copies[i], data + i * weights.row_bytes, n);
            piece.data = (const uint8_t *) copies;
            piece.stride = kBytes;
        }
        size_t row = 0;
        const auto next_rows = [&](auto count) GGPIPE_AVX2 GGPIPE_INLINE {
            if (row == 0) add_rows<Type, count(), true>(piece, a, rows.data(), sums);
            else add_rows<Type, count(), false>(piece, a, rows.data() + row, sums + row * kLanes);
            row += count();
        };
        while (row + 3 <= rows.size()) next_rows(std::integral_constant<int, 3>());
        if (row + 2 == rows.size()) next_rows(std::integral_constant<int, 2>());
        if (row + 1 == rows.size()) next_rows(std::integral_constant<int, 1>());
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
    static constexpr Kernel of_f32{"AVX2", false, kLanes, kNumberBytes, round_row<F32>, multiply<F32>};
    static constexpr Kernel of_f16{"AVX2", false, kLanes, kNumberBytes, round_row<F16>, multiply<F16>};
    static constexpr Kernel of_bf16{"AVX2", false, kLanes, kNumberBytes, round_row<BF16>, multiply<BF16>};
    switch (type) {
        case GGML_TYPE_F32: return &of_f32;
        case GGML_TYPE_F16: return &of_f16;
        case GGML_TYPE_BF16: return &of_bf16;
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
