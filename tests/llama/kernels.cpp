// Compares the kernels for AVX-VNNI with those for AVX2, on CPUs that only have the latter: AVX-VNNI's two instructions are replaced
// by functions that compute the same. Prints a line for each type of weights; see test_kernels.py.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <immintrin.h>

#include "kernels.h"

#define GGPIPE_QUADS stand_ins
#define GGPIPE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define GGPIPE_DOT_BYTES bytes_dot
#define GGPIPE_DOT_PAIRS pairs_dot

namespace ggpipe::GGPIPE_QUADS {
// vpdpbusd: four products of bytes, the first without signs, and a sum of 32 bits.
GGPIPE_AVX2 inline __m256i bytes_dot(__m256i sum, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
// vpdpwssd: two products of 16-bit numbers.
GGPIPE_AVX2 inline __m256i pairs_dot(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
}  // namespace ggpipe::GGPIPE_QUADS

#include "quad_grids.h"
#include "quad_tiles.h"

using namespace ggpipe;

namespace {
struct Type {
    const char * name;
    ggml_type type;
    int block, bytes, group;
    const Kernel * kernel;
};

// Results of all rows of activations, or of none where a row's bits depend on the number of rows.
std::vector<float> results(const Kernel & kernel, const std::vector<uint8_t> & weights, int64_t n_rows, const std::vector<float> & x, int64_t n_columns) {
    const int64_t n = x.size() / n_columns, n_chunks = (n_columns + kChunk - 1) / kChunk;
    std::vector<int8_t> numbers(n_chunks * n * kernel.chunk_bytes);
    const Activations a{n, n_columns, n_chunks, numbers.data(), nullptr, nullptr, nullptr};
    for (int64_t i = 0; i < n; i++) kernel.quantize(x.data() + i * n_columns, i, a);
    const Weights matrix{weights.data(), n_rows, weights.size() / n_rows, weights.data()};
    std::vector<float> all;
    for (size_t count : {70, 1, 2, 3, 4, 5, 6, 7, 8, 23}) {
        std::vector<float> some(n_rows * count, -1);
        std::vector<float *> to;
        for (size_t i = 0; i < count; i++) to.push_back(some.data() + i * n_rows);
        const int64_t row = (n - count) / 2;
        for (int64_t first = 0; first < n_rows; first += kernel.n_lanes) kernel.multiply(matrix, first, a, row, count, to.data());
        if (all.empty()) all = some;
        if (memcmp(all.data() + row * n_rows, some.data(), some.size() * sizeof(float))) return {};
    }
    return all;
}

// Blocks of Q2_K, eight rows side by side, as ggml repacks them: scales, minima, pairs of those of units, and numbers.
std::vector<uint8_t> repacked(const std::vector<uint8_t> & weights, size_t n_rows) {
    std::vector<uint8_t> all;
    const size_t row_bytes = weights.size() / n_rows;
    for (size_t first = 0; first < n_rows; first += 8) {
        for (size_t block = 0; block < row_bytes; block += 84) {
            const auto take = [&](size_t at, size_t step, size_t n_bytes) {
                for (size_t i = at; i < at + n_bytes; i += step) {
                    for (size_t row = first; row < first + 8; row++) {
                        const uint8_t * from = weights.data() + row * row_bytes + block + i;
                        all.insert(all.end(), from, from + step);
                    }
                }
            };
            take(80, 2, 4);
            take(0, 2, 16);
            take(16, 8, 64);
        }
    }
    return all;
}

// Where a block's scale is, and how many bytes not to change: some more, or all that it is a part of.
std::pair<size_t, size_t> scale_of(ggml_type type, int group) {
    if (group > 1 && type == GGML_TYPE_Q2_K) return {0, 4};
    switch (type) {
        case GGML_TYPE_Q6_K: return {208, 2};
        case GGML_TYPE_Q3_K: return {108, 2};
        case GGML_TYPE_Q2_K: return {80, 4};
        case GGML_TYPE_IQ1_M: return {48, 8};
        case GGML_TYPE_TQ1_0: return {52, 2};
        case GGML_TYPE_TQ2_0: return {64, 2};
        case GGML_TYPE_MXFP4: return {0, 1};
        default: return {0, 4};
    }
}

bool equal(const Type & type) {
    const Kernel * other_kernel = avx2_kernel(type.type, type.group > 1);
    const Kernel & ours = *type.kernel, & other = *(other_kernel ? other_kernel : avx2_grid_kernel(type.type));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int64_t n_columns : {256, type.block < 256 ? 512 + type.block : 768}) {
        for (int64_t n_rows : {type.group == 1 ? 13 : 8, 40}) {
            for (int pattern = 0; pattern < 6; pattern++) {
                std::vector<uint8_t> weights(n_rows * n_columns / type.block * type.bytes);
                std::vector<float> x(70 * n_columns);
                // At random, or all bytes alike, which gives the highest sums. Scales, wherever they are, stay finite.
                for (auto & byte : weights) byte = random() & 0xbf;
                for (auto & value : x) value = pattern ? (random() % 8 ? 1 : -1) : normal(random);
                if (pattern) {
                    static constexpr uint8_t kBytes[] = {0xff, 0x7f, 0x80, 0x88, 0x00};
                    const auto [at, n_bytes] = scale_of(type.type, type.group);
                    const size_t size = type.bytes * type.group;
                    for (size_t i = 0; i < weights.size(); i++) {
                        const bool is_scale = i % size >= at * type.group && i % size < (at + n_bytes) * type.group;
                        if (!is_scale) weights[i] = kBytes[pattern - 1];
                    }
                    for (int64_t i = 0; i < n_columns * 3; i++) x[i] = i < n_columns ? 1 : -1;
                }
                const auto found = results(ours, weights, n_rows, x, n_columns), expected = results(other, weights, n_rows, x, n_columns);
                if (expected.empty() || found.size() != expected.size()) return false;
                if (memcmp(found.data(), expected.data(), found.size() * sizeof(float))) return false;
                if (type.type == GGML_TYPE_Q2_K && type.group == 1 && n_rows % 8 == 0) {
                    for (const Kernel * of_repacked : {stand_ins::kernel_of(type.type, true), avx2_kernel(type.type, true)}) {
                        if (results(*of_repacked, repacked(weights, n_rows), n_rows, x, n_columns) != expected) return false;
                    }
                }
                for (float value : found) {
                    if (!std::isfinite(value)) return false;
                }
            }
        }
    }
    return true;
}
}  // namespace

int main() {
    const Type types[] = {
#define GGPIPE_FORMAT(NAME, FORMAT) {#FORMAT, GGML_TYPE_##NAME, stand_ins::FORMAT::kBlock, stand_ins::FORMAT::kBytes, stand_ins::FORMAT::From::kGroup, stand_ins::kernel_with<stand_ins::FORMAT>()},
#define GGPIPE_PLAIN(NAME) GGPIPE_FORMAT(NAME, NAME)
#define GGPIPE_REPACKED(NAME) GGPIPE_FORMAT(NAME, Repacked##NAME)
        GGPIPE_FOR_FORMATS(GGPIPE_PLAIN)
        GGPIPE_FOR_REPACKED_FORMATS(GGPIPE_REPACKED)
        GGPIPE_FOR_GRID_FORMATS(GGPIPE_PLAIN)
    };
    for (const Type & type : types) printf("%s: %s\n", type.name, equal(type) ? "equal" : "different");
}
