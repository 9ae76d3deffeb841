// Products of quantized weights and several rows, in default numerics, on CPUs with AVX-512 VNNI.
//
// ggml reads and unpacks a matrix again for each row or two of a run, so two rows take twice as long as one. Here a tile of
// weights, 16 rows by 256 columns, is unpacked such that each lane of a vector holds its own row, and all rows of activations
// are multiplied with it while it is in registers or in the first cache: rows of a small run take little more time than one.
// Nothing is added up across a vector. The bits of what is computed here depend neither on the number of rows nor on that of
// threads.
//
// Activations are quantized as ggml does it, so results differ from ggml's only by the order in which blocks are added up; those
// of Q8_0 in runs of fewer than 64 rows not even by that, so that single rows, which are left to ggml, have the same bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "fast.h"
#include "weights.h"

namespace ggpipe {

#ifdef __x86_64__
namespace {
constexpr int kMaxUnits = 16, kMaxStarts = 64;  // of a tile

struct alignas(64) Line { float results[kLanes]; };
struct Weights {
    const uint8_t * data;
    int64_t n_rows;
    size_t row_bytes;
};
struct Activations {  // quantized as a format of weights wants them: chunk by chunk, and in these row by row
    int64_t n_rows, n_columns, n_chunks;
    int8_t * numbers;        // kChunk of each row
    int32_t * starts;        // of each unit, or of each four columns: what makes up for the offset of the weights' numbers
    float * scales, * sums;  // of each unit; a sum is that of its values
};
Activations activations_of(const FastGraph::Quantized & quantized, QuantizedMemory & memory) {
    const ggml_tensor * source = quantized.source;
    return {source->ne[1] * source->ne[2], source->ne[0], (source->ne[0] + kChunk - 1) / kChunk, memory.numbers.data(),
            memory.starts.data(), memory.scales.data(), memory.sums.data()};
}

typedef int8_t Narrow __attribute__((vector_size(kLanes)));

// Quantize one row of `a`.
template <class Format> GGPIPE_TARGET void quantize(const float * x, int64_t row, const Activations & a) {
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        const int64_t at = chunk * a.n_rows + row;
        const int n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk), step = Format::kSuper ? kChunk : 32;
        int8_t * numbers = a.numbers + at * kChunk;
        if (n < kChunk) {  // the rest adds nothing
            memset(numbers + n, 0, kChunk - n);
            const int64_t unit = at * kMaxUnits + n / Format::kUnit, units = (kChunk - n) / Format::kUnit;
            std::fill_n(&a.starts[at * kMaxStarts], kMaxStarts, 0);
            std::fill_n(&a.scales[unit], units, 0.0f);
            std::fill_n(&a.sums[unit], units, 0.0f);
        }
        for (int from = 0; from < n; from += step) {
            F highest = {};
            for (int i = from; i < from + step; i += kLanes) {
                F values;
                memcpy(&values, x + chunk * kChunk + i, sizeof values);
                values = values < 0 ? -values : values;
                highest = values > highest ? values : highest;
            }
            float max = 0, scale;
            for (int lane = 0; lane < kLanes; lane++) max = std::max(max, ((const float *) &highest)[lane]);
            const float inverse = max > 0 ? 127 / max : 0;
            if (Format::kSuper) {
                scale = max > 0 ? 1 / inverse : 0;
            } else {
                scale = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(max / 127), _MM_FROUND_TO_NEAREST_INT)));
            }
            for (int begin = from; begin < from + step; begin += Format::kUnit) {
                I sums = {};
                int32_t sum = 0;
                for (int i = begin; i < begin + Format::kUnit; i += kLanes) {
                    F values;
                    memcpy(&values, x + chunk * kChunk + i, sizeof values);
                    values = values * inverse + 0x1.8p23f;  // rounds to an integer, in the lowest bits
                    const I integers = ((I) values & 0x7fffff) - 0x400000;
                    sums += integers;
                    const auto narrow = __builtin_convertvector(integers, Narrow);
                    memcpy(numbers + i, &narrow, sizeof narrow);
                }
                for (int lane = 0; lane < kLanes; lane++) sum += ((const int32_t *) &sums)[lane];
                const int64_t unit = at * kMaxUnits + begin / Format::kUnit;
                if (Format::kQuads) {
                    for (int i = begin; i < begin + Format::kUnit; i += 4) {
                        a.starts[at * kMaxStarts + i / 4] = -Format::kOffset * (numbers[i] + numbers[i + 1] + numbers[i + 2] + numbers[i + 3]);
                    }
                } else {
                    a.starts[at * kMaxStarts + begin / Format::kUnit] = -Format::kOffset * sum;
                }
                a.scales[unit] = scale;
                a.sums[unit] = scale * sum;
            }
        }
    }
}

// Some rows of activations, while they are multiplied with a tile.
template <int R, int kUnit, bool kHasMinima> struct Sums {
    static constexpr int kMaxRows = 8, kLines = 1;  // of each row
    const int8_t * numbers[R];
    const int32_t * starts[R];
    int64_t first[R];  // unit
    const Activations & a;
    F sums[R];
    Line * lines;

    GGPIPE_TARGET GGPIPE_INLINE Sums(const Activations & a, int64_t chunk, const int32_t * rows, Line * lines) : a(a), lines(lines) {
        for (int r = 0; r < R; r++) {
            const int64_t at = chunk * a.n_rows + rows[r];
            numbers[r] = a.numbers + at * kChunk;
            starts[r] = a.starts + at * kMaxStarts;
            first[r] = at * kMaxUnits;
            memcpy(&sums[r], &lines[r], sizeof sums[r]);
        }
    }
    GGPIPE_TARGET GGPIPE_INLINE void store() {
        for (int r = 0; r < R; r++) memcpy(&lines[r], &sums[r], sizeof sums[r]);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add(int u, const U * weights, F scale, F minimum) {
        constexpr int kSteps = kUnit / 4;
        __m512i products[R];
        for (int r = 0; r < R; r++) products[r] = _mm512_set1_epi32(starts[r][u]);
        for (int step = 0; step < kSteps; step++) {
            for (int r = 0; r < R; r++) {
                int32_t four;
                memcpy(&four, numbers[r] + 4 * (u * kSteps + step), 4);
                products[r] = _mm512_dpbusd_epi32(products[r], (__m512i) weights[step], _mm512_set1_epi32(four));
            }
        }
        for (int r = 0; r < R; r++) {
            sums[r] += __builtin_convertvector((I) products[r], F) * (scale * a.scales[first[r] + u]);
            if (kHasMinima) sums[r] += minimum * a.sums[first[r] + u];
        }
    }
};

// The same with the bits of ggml's kernel for one row.
template <int R> struct QuadSums {
    static constexpr int kMaxRows = 2, kLines = 8;
    const int8_t * numbers[R];
    const int32_t * starts[R];
    int64_t first[R];
    const Activations & a;
    __m512 sums[R][8];
    Line * lines;

    GGPIPE_TARGET GGPIPE_INLINE QuadSums(const Activations & a, int64_t chunk, const int32_t * rows, Line * lines) : a(a), lines(lines) {
        for (int r = 0; r < R; r++) {
            const int64_t at = chunk * a.n_rows + rows[r];
            numbers[r] = a.numbers + at * kChunk;
            starts[r] = a.starts + at * kMaxStarts;
            first[r] = at * kMaxUnits;
        }
        memcpy(sums, lines, sizeof sums);
    }
    GGPIPE_TARGET GGPIPE_INLINE void store() { memcpy(lines, sums, sizeof sums); }
    GGPIPE_TARGET GGPIPE_INLINE void add(int u, const U * weights, F scale, F) {
        __m512 scales[R];
        for (int r = 0; r < R; r++) scales[r] = (__m512) (scale * a.scales[first[r] + u]);
        for (int i = 0; i < 8; i++) {
            for (int r = 0; r < R; r++) {
                int32_t four;
                memcpy(&four, numbers[r] + 4 * (u * 8 + i), 4);
                const __m512i start = _mm512_set1_epi32(starts[r][u * 8 + i]);
                const __m512i product = _mm512_dpbusd_epi32(start, (__m512i) weights[i], _mm512_set1_epi32(four));
                sums[r][i] = _mm512_fmadd_ps(scales[r], _mm512_cvtepi32_ps(product), sums[r][i]);
            }
        }
    }
    GGPIPE_TARGET static Line total(const Line * lines) {
        F s[8];
        memcpy(s, lines, sizeof s);
        const F all = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        Line line;
        memcpy(&line, &all, sizeof line);
        return line;
    }
};

template <class Format, int R> using SumsOf =
    std::conditional_t<Format::kQuads, QuadSums<R>, Sums<R, Format::kUnit, Format::kHasMinima>>;

// Calls `function` with a number of rows that is a constant: at least n, or kMax.
template <int kMax, class Function> GGPIPE_TARGET GGPIPE_INLINE inline void with_count(size_t n, const Function & function) {
    if (n == 1) function(std::integral_constant<int, 1>());
    else if (n == 2 || kMax == 2) function(std::integral_constant<int, 2>());
    else if (n <= 4) function(std::integral_constant<int, std::min(4, kMax)>());
    else function(std::integral_constant<int, kMax>());
}

template <class Format> struct Tile {
    U numbers[kChunk / Format::kUnit][Format::kUnit / 4];
    F scales[kChunk / Format::kUnit], minima[kChunk / Format::kUnit];
};

// The results of 16 rows of weights, from `first` on, for some rows of activations.
template <class Format> GGPIPE_TARGET void multiply(const Weights & weights, int64_t first, const Activations & a,
                                                   const std::vector<int32_t> & rows, float * const * to) {
    constexpr int kMax = SumsOf<Format, 1>::kMaxRows, kLines = SumsOf<Format, 1>::kLines;
    // Padded: row 0 again, in place of those that a constant number of rows has too many.
    static thread_local std::vector<int32_t> padded;
    static thread_local std::vector<Line> lines;
    padded = rows;
    padded.resize(rows.size() + kMax - 1, rows[0]);
    lines.assign(padded.size() * kLines, Line{});
    using From = typename Format::From;
    constexpr int kPieces = kLanes / From::kGroup, kBytes = kChunk / Format::kBlock * Format::kBytes * From::kGroup;  // of a piece
    const size_t stride = weights.row_bytes * From::kGroup;
    uint8_t copies[kPieces][kBytes];  // where there are not enough rows or columns for a tile
    const int n_rows = std::min<int64_t>(kLanes, weights.n_rows - first);
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        const int n_columns = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        const uint8_t * data = weights.data + first * weights.row_bytes + chunk * kBytes;
        From from(data, stride);
        if (n_columns < kChunk || n_rows < kLanes) {
            memset(copies, 0, sizeof copies);
            for (int i = 0; i < n_rows / From::kGroup; i++) memcpy(copies[i], data + i * stride, kBytes * n_columns / kChunk);
            from = From(copies[0], kBytes);
        } else {
            // Into the second cache: after a row's last chunk, the first ones of the same lane in the next tile.
            constexpr int kAhead = (864 * From::kGroup + kBytes - 1) / kBytes;
            const uint8_t * next = data + kAhead * kBytes;
            if (chunk + kAhead >= a.n_chunks) next += kPieces * stride - a.n_chunks * kBytes;
            for (int piece = 0; piece < kPieces; piece++, next += stride) {
                for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(next + i, 0, 2);
            }
        }
        if (rows.size() <= kMax) {
            with_count<kMax>(rows.size(), [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                SumsOf<Format, count()> sums(a, chunk, padded.data(), lines.data());
                Format::unpack(from, [&](int u, const U * numbers, F scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
                    sums.add(u, numbers, scale, minimum);
                });
                sums.store();
            });
            continue;
        }
        Tile<Format> tile;
        Format::unpack(from, [&](int u, const U * numbers, F scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
            memcpy(tile.numbers[u], numbers, sizeof tile.numbers[u]);
            tile.scales[u] = scale;
            tile.minima[u] = minimum;
        });
        for (size_t row = 0; row < rows.size(); row += kMax) {
            with_count<kMax>(rows.size() - row, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                SumsOf<Format, count()> sums(a, chunk, padded.data() + row, lines.data() + row * kLines);
                for (int u = 0; u < kChunk / Format::kUnit; u++) sums.add(u, tile.numbers[u], tile.scales[u], tile.minima[u]);
                sums.store();
            });
        }
    }
    for (size_t i = 0; i < rows.size(); i++) {
        if constexpr (Format::kQuads) lines[i * kLines] = QuadSums<1>::total(&lines[i * kLines]);
        memcpy(to[i] + first, &lines[i * kLines], n_rows * sizeof(float));
    }
}

struct Kernel {
    bool is_repacked;  // what it takes
    int min_rows;      // from which on it is faster, as measured
    void (*quantize)(const float *, int64_t, const Activations &);
    void (*multiply)(const Weights &, int64_t, const Activations &, const std::vector<int32_t> &, float * const *);
};
template <class Format, int kMinRows> constexpr Kernel kernel_of() {
    return {Format::From::kGroup > 1, kMinRows, quantize<Format>, multiply<Format>};
}
// From 64 rows on, Q8_0 is multiplied in half the time without ggml's bits.
const Kernel * kernel_for(ggml_type type, int64_t n_rows) {
    static const bool can = __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni");
    static constexpr Kernel fast = kernel_of<Q8_0_Fast, 2>();
    if (can && type == GGML_TYPE_Q8_0 && n_rows >= 64) return &fast;
    switch (can ? type : GGML_TYPE_COUNT) {
#define GGPIPE_KERNEL(NAME, MIN_ROWS) \
        case GGML_TYPE_##NAME: { \
            static constexpr Kernel kernel = kernel_of<NAME, MIN_ROWS>(); \
            return &kernel; \
        }
        GGPIPE_KERNEL(Q8_0, 2)
        GGPIPE_KERNEL(Q4_0, 1)
        GGPIPE_KERNEL(Q4_1, 1)
        GGPIPE_KERNEL(Q5_0, 2)
        GGPIPE_KERNEL(Q5_1, 2)
        GGPIPE_KERNEL(IQ4_NL, 1)
        GGPIPE_KERNEL(MXFP4, 1)
        GGPIPE_KERNEL(Q2_K, 2)
        GGPIPE_KERNEL(Q3_K, 2)
        GGPIPE_KERNEL(Q4_K, 1)
        GGPIPE_KERNEL(Q5_K, 2)
        GGPIPE_KERNEL(Q6_K, 3)
        GGPIPE_KERNEL(IQ4_XS, 1)
#undef GGPIPE_KERNEL
        default: return nullptr;
    }
}

const float * row_of(const ggml_tensor * t, int64_t row) {
    return (const float *) ((const char *) t->data + row % t->ne[1] * t->nb[1] + row / t->ne[1] * t->nb[2]);
}

// All threads quantize some rows, and wait for the others.
void quantize_rows(FastGraph::Quantized & quantized, const Activations & a) {
    const Kernel & kernel = *kernel_for(quantized.type, a.n_rows);
    for (int64_t row; (row = quantized.taken.fetch_add(1, std::memory_order_relaxed)) < a.n_rows;) {
        kernel.quantize(row_of(quantized.source, row), row, a);
        quantized.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; quantized.done.load(std::memory_order_acquire) < a.n_rows; spins++) {
        if (spins < 1000) _mm_pause();
        else std::this_thread::yield();  // whoever has the last row may have lost its core
    }
}
}  // namespace

bool is_product(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) return false;
    if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
    const ggml_tensor * weights = node->src[0], * source = node->src[1];
    const Kernel * kernel = kernel_for(weights->type, source->ne[1] * source->ne[2]);
    if (!kernel || weights->ne[3] != 1 || weights->nb[0] != ggml_type_size(weights->type)) return false;
    if (source->type != GGML_TYPE_F32 || source->nb[0] != sizeof(float) || source->ne[3] != 1 || node->nb[0] != sizeof(float)) return false;
    const bool is_repacked = weights->extra && !strcmp(ggml_backend_buft_name(weights->buffer->buft), "CPU_REPACK");
    if (kernel->is_repacked != is_repacked || (weights->extra && !is_repacked)) return false;
    if (node->op == GGML_OP_MUL_MAT) return weights->ne[2] == 1 && source->ne[2] == 1 && source->ne[1] >= kernel->min_rows;
    // Rows of an expert that is used, where all are as likely.
    const double n = ggml_nelements(node->src[2]), n_experts = weights->ne[2];
    return n >= kernel->min_rows * n_experts * (1 - std::pow(1 - 1 / n_experts, n));
}

void FastGraph::add(ggml_tensor * product) {
    const ggml_tensor * source = product->src[1];
    const ggml_type type = product->src[0]->type;
    if (quantized.empty() || quantized.back().source != source || quantized.back().type != type) {
        quantized.emplace_back().source = source;
        quantized.back().type = type;
        const Activations a = activations_of(quantized.back(), memory);
        const size_t n = a.n_chunks * a.n_rows;
        if (memory.numbers.size() < n * kChunk) memory.numbers.resize(n * kChunk);
        if (memory.scales.size() < n * kMaxUnits) {
            memory.starts.resize(n * kMaxStarts);
            memory.scales.resize(n * kMaxUnits);
            memory.sums.resize(n * kMaxUnits);
        }
    }
    product->op_params[kIndex] = products.size();
    products.emplace_back(quantized.back());
}

void compute_product(ggml_tensor * node, int, int n_threads, void * state) {
    struct Use { int32_t expert; std::vector<int32_t> rows; std::vector<float *> to; };
    static thread_local std::vector<Use> uses;  // of a matrix
    static thread_local std::vector<int32_t> use_of;
    const ggml_tensor * weights = node->src[0], * ids = node->src[2];
    FastGraph & graph = *(FastGraph *) state;
    FastGraph::Product & product = graph.products[node->op_params[FastGraph::kIndex]];
    const Activations activations = activations_of(product.quantized, graph.memory);
    quantize_rows(product.quantized, activations);
    const Kernel & kernel = *kernel_for(weights->type, activations.n_rows);
    size_t n_uses = 0;
    const auto add = [&](int32_t expert) -> Use & {
        if (uses.size() == n_uses) uses.emplace_back();
        Use & use = uses[n_uses++];
        use.expert = expert;
        use.rows.clear();
        use.to.clear();
        return use;
    };
    if (ids) {
        use_of.assign(weights->ne[2], -1);
        for (int64_t token = 0; token < ids->ne[1]; token++) {
            for (int64_t i = 0; i < ids->ne[0]; i++) {
                const int32_t expert = *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + i * ids->nb[0]);
                if (use_of[expert] < 0) {
                    use_of[expert] = n_uses;
                    add(expert);
                }
                Use & use = uses[use_of[expert]];
                use.rows.push_back(token * node->src[1]->ne[1] + i % node->src[1]->ne[1]);
                use.to.push_back((float *) ((char *) node->data + i * node->nb[1] + token * node->nb[2]));
            }
        }
    } else {
        Use & all = add(0);
        for (int64_t row = 0; row < activations.n_rows; row++) {
            all.rows.push_back(row);
            all.to.push_back((float *) ((char *) node->data + row * node->nb[1]));
        }
    }
    const int64_t n_tiles = (weights->ne[1] + kLanes - 1) / kLanes, n_items = n_tiles * n_uses;
    const int64_t step = std::max<int64_t>(1, n_items / (8 * n_threads));
    for (int64_t from; (from = product.taken.fetch_add(step, std::memory_order_relaxed)) < n_items;) {
        for (int64_t item = from; item < std::min(from + step, n_items); item++) {
            const Use & use = uses[item / n_tiles];
            const Weights matrix{(const uint8_t *) weights->data + use.expert * weights->nb[2], weights->ne[1], weights->nb[1]};
            kernel.multiply(matrix, item % n_tiles * kLanes, activations, use.rows, use.to.data());
        }
    }
}

#else
bool is_product(const ggml_tensor *) { return false; }
void FastGraph::add(ggml_tensor *) {}
void compute_product(ggml_tensor *, int, int, void *) {}
#endif

}  // namespace ggpipe
