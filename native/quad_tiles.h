// Tiles of weights times quantized activations, with AVX2 or AVX-VNNI; see products.cpp.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "quad_sums.h"

namespace ggpipe::GGPIPE_QUADS {

// ---- more rows: tiles of lanes ------------------------------------------------------------------------------

// A chunk of 16 rows of weights, unpacked: eight rows as the lanes of one vector, and eight as those of another.
template <class Format> struct Tile {
    static constexpr int kUnits = kChunk / Format::kUnit, kFours = Format::kUnit / 4;
    // By twos, 16 bits may hold the sums of a whole unit where by fours they do not: each part loads all numbers again.
    static constexpr bool kTwosFit = Format::kSuper && twos_at_once<Format>(kFours) == kFours && dots_at_once<Format>(kFours) < kFours;
    static constexpr bool kByFours = GGPIPE_QUADS::kByFours<Format> && !kTwosFit;
    V numbers[kUnits][kFours][2], sizes[Format::kSigned ? kUnits : 1][kFours][2];  // without their signs
    F scales[kUnits][2], minima[kUnits][2];
    V integers[kUnits][2];  // kSuper: scales as pairs of 16-bit numbers
    Block blocks[2];
    int n_units;  // of both halves

    template <class Prefetch>
    GGPIPE_AVX2 GGPIPE_INLINE void fill(int half, const InLanes<typename Format::From> & from, const Prefetch & prefetch) {
        n_units = from.n_units * 32 / Format::kUnit;
        if constexpr (Format::kSuper) {
            Format::read(from, blocks[half]);
            for (int i = 0; i < kUnits / 2; i++) {
                for (int j = 0; j < 2; j++) integers[2 * i + j][half] = one_of_pairs<kByFours>(blocks[half].scales[i], j);
            }
            Format::unpack(from, [&](int u, const V * fours) GGPIPE_AVX2 GGPIPE_INLINE { fill(half, u, fours, prefetch); });
        } else {
            Format::unpack(from, [&](int u, const V * fours, F scale, F minimum) GGPIPE_AVX2 GGPIPE_INLINE {
                scales[u][half] = scale;
                if constexpr (Format::kHasMinima) minima[u][half] = minimum;
                fill(half, u, fours, prefetch);
            });
        }
    }
    template <class Prefetch> GGPIPE_AVX2 GGPIPE_INLINE void fill(int half, int u, const V * fours, const Prefetch & prefetch) {
        GGPIPE_UNROLLED(i, kFours) {
            numbers[u][i][half] = fours[i];
            if constexpr (Format::kSigned) sizes[u][i][half] = _mm256_abs_epi8(fours[i]);
        }
        prefetch(u);
    }

    // How many products with four columns fit where they are added up: in 16 bits, unless kSigned, or kByFours without kSuper.
    static constexpr int fours_at_once() { return kByFours ? dots_at_once<Format>(kFours) : twos_at_once<Format>(kFours); }
    GGPIPE_AVX2 GGPIPE_INLINE static V four_columns(const Numbers<Format> & x, int u, int four) {  // in all lanes
        int32_t columns;
        memcpy(&columns, x.numbers + u * Format::kUnit + 4 * four, sizeof columns);
        return _mm256_set1_epi32(columns);
    }
    // The results of R rows of activations.
    template <int R> GGPIPE_AVX2 GGPIPE_INLINE void multiply(const Activations & all, int64_t chunk, int64_t row, F (*results)[2]) const {
        constexpr int kAtOnce = fours_at_once();
        const Numbers<Format> * x[R];
        F sums[R][2];
        V totals[R][2];  // kSuper: of the chunk so far
        GGPIPE_UNROLLED(r, R) {
            x[r] = (const Numbers<Format> *) all.numbers + chunk * all.n_rows + row + r;
            GGPIPE_UNROLLED(half, 2) {
                sums[r][half] = results[r][half];
                totals[r][half] = _mm256_setzero_si256();
            }
        }
        _Pragma("GCC unroll 1") for (int u = 0; u < n_units; u++) {
            V products[R][2];
            GGPIPE_UNROLLED(part, kFours / kAtOnce) {
                if constexpr (Format::kSuper && kAtOnce < kFours) {  // row by row: else sums would not fit into registers
                    GGPIPE_UNROLLED(r, R) {
                        GGPIPE_UNROLLED(half, 2) {
                            V to;
                            GGPIPE_UNROLLED(i, kAtOnce) {
                                const int four = part * kAtOnce + i;
                                add_products<kByFours>(numbers[u][four][half], four_columns(*x[r], u, four), i == 0, to);
                            }
                            totals[r][half] = with_pairs(totals[r][half], to, integers[u][half]);
                            in_this_order(totals[r][half]);
                        }
                    }
                    continue;
                }
                V to[R][2];
                GGPIPE_UNROLLED(i, kAtOnce) {
                    const int four = part * kAtOnce + i;
                    GGPIPE_UNROLLED(r, R) {
                        const V in_all = four_columns(*x[r], u, four);
                        GGPIPE_UNROLLED(half, 2) {
                            V & sum = to[r][half];
                            if constexpr (Format::kSigned) {
                                const V added = signed_products(numbers[u][four][half], sizes[u][four][half], in_all);
                                sum = i ? sum_of(sum, added) : added;
                            } else {
                                add_products<kByFours>(numbers[u][four][half], in_all, i == 0, sum);
                            }
                            in_this_order(sum);
                        }
                    }
                }
                GGPIPE_UNROLLED(r, R) {
                    GGPIPE_UNROLLED(half, 2) {
                        if constexpr (Format::kSuper) {
                            totals[r][half] = with_pairs(totals[r][half], to[r][half], integers[u][half]);
                        } else if constexpr (Format::kSigned || kByFours) {
                            products[r][half] = to[r][half];
                        } else {
                            const V added = _mm256_madd_epi16(to[r][half], _mm256_set1_epi16(1));
                            products[r][half] = part ? sum_of(products[r][half], added) : added;
                        }
                    }
                }
            }
            if constexpr (!Format::kSuper) {
                GGPIPE_UNROLLED(r, R) {
                    GGPIPE_UNROLLED(half, 2) {
                        sums[r][half] = with_unit(sums[r][half], products[r][half], *x[r], u, scales[u][half], minima[u][half]);
                    }
                }
            }
        }
        GGPIPE_UNROLLED(r, R) {
            GGPIPE_UNROLLED(half, 2) {
                if constexpr (Format::kSuper) sums[r][half] = with_block(sums[r][half], totals[r][half], *x[r], blocks[half]);
                results[r][half] = sums[r][half];
            }
        }
    }
};

// ---- a product ----------------------------------------------------------------------------------------------

// Eight rows of weights, chunk by chunk.
template <class Format> class Eight {
   public:
    using From = typename Format::From;
    // `later`: how many rows after these to fetch meanwhile.
    GGPIPE_AVX2 GGPIPE_INLINE Eight(const Weights & weights, int64_t first, int later)
        : n_rows_(std::clamp<int64_t>(weights.n_rows - first, 0, kLanes)), stride_(weights.row_bytes * From::kGroup) {
        data_ = weights.data + (n_rows_ ? first : 0) * weights.row_bytes;
        // Into the second cache, in the order of their addresses. The CPU does not see the pattern of eight rows.
        const size_t n_bytes = weights.n_rows * weights.row_bytes, at = (first + later) * weights.row_bytes + kAhead;
        ahead_ = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    }
    // kFills: at the end of rows, zeros make it a whole chunk.
    template <bool kFills = false> GGPIPE_AVX2 GGPIPE_INLINE From chunk(int64_t chunk, int64_t n_columns) {
        const int n = std::min<int64_t>(kChunk, n_columns - chunk * kChunk), n_units = (kFills ? kChunk : n) / 32;
        const uint8_t * data = data_ + chunk * kBytes;
        if (n_rows_ == kLanes && n >= 32 * n_units) return From(data, stride_, n_units);
        memset(copies_, 0, sizeof copies_);
        for (int i = 0; i < n_rows_ / From::kGroup; i++) memcpy(copies_[i], data + i * stride_, kBytes * n / kChunk);
        return From(copies_[0], kBytes, n_units);
    }
    GGPIPE_AVX2 GGPIPE_INLINE void prefetch(int64_t chunk, int u) const {
        constexpr int kUnits = kChunk / Format::kUnit, kUnitBytes = kPieces * kBytes / kUnits;
        for (int i = 0; i < kUnitBytes; i += 64) __builtin_prefetch(ahead_ + (chunk * kUnits + u) * kUnitBytes + i, 0, 2);
    }
    GGPIPE_AVX2 GGPIPE_INLINE void store(F results, float * to) const {
        const F ordered = From::in_order(results);
        if (n_rows_ == kLanes) _mm256_storeu_ps(to, ordered);
        else memcpy(to, &ordered, n_rows_ * sizeof(float));
    }

   private:
    static constexpr int kPieces = kLanes / From::kGroup, kBytes = kChunk / Format::kBlock * Format::kBytes * From::kGroup;  // of a piece
    const int n_rows_;
    const size_t stride_;
    const uint8_t * data_, * ahead_;
    uint8_t copies_[kPieces][kBytes];  // where there are not enough rows, or columns
};

// For one row, chunks of constant length are faster, even if most of the last one is zeros.
template <class Format, int R>
GGPIPE_AVX2 void multiply_few(const Weights & weights, int64_t first, const Activations & a, int64_t row, float * const * to) {
    Eight<Format> eight(weights, first, kLanes);
    F results[R];
    for (F & result : results) result = _mm256_setzero_ps();
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        multiply_quads<Format, R>(eight.template chunk<R == 1>(chunk, a.n_columns), a, chunk, row, results,
                                  [&](int u) GGPIPE_AVX2 GGPIPE_INLINE { eight.prefetch(chunk, u); });
    }
    for (int r = 0; r < R; r++) eight.store(results[r], to[r] + first);
}

template <class Format>
GGPIPE_AVX2 void multiply_many(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n, float * const * to) {
    struct alignas(32) Line { float results[kTileRows]; };
    static thread_local std::vector<Line> lines;
    lines.assign(n, Line{});
    auto * results = (F (*)[2]) lines.data();
    Eight<Format> halves[2] = {{weights, first, kTileRows}, {weights, first + kLanes, kTileRows}};
    Tile<Format> tile;
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        for (int half = 0; half < 2; half++) {
            tile.fill(half, halves[half].chunk(chunk, a.n_columns),
                      [&](int u) GGPIPE_AVX2 GGPIPE_INLINE { halves[half].prefetch(chunk, u); });
        }
        size_t i = 0;
        for (; i + 4 <= n; i += 4) tile.template multiply<4>(a, chunk, row + i, results + i);
        switch (n - i) {
            case 3: tile.template multiply<3>(a, chunk, row + i, results + i); break;
            case 2: tile.template multiply<2>(a, chunk, row + i, results + i); break;
            case 1: tile.template multiply<1>(a, chunk, row + i, results + i); break;
        }
    }
    for (size_t i = 0; i < n; i++) {
        for (int half = 0; half < 2; half++) halves[half].store(results[i][half], to[i] + first + half * kLanes);
    }
}

template <class Format>
GGPIPE_AVX2 void multiply(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n, float * const * to) {
    if (n > 4) return multiply_many<Format>(weights, first, a, row, n, to);  // up to 4, quads are as fast or faster
    for (int64_t eight = first; eight < std::min<int64_t>(first + kTileRows, weights.n_rows); eight += kLanes) {
        switch (n) {
            case 1: multiply_few<Format, 1>(weights, eight, a, row, to); break;
            case 2: multiply_few<Format, 2>(weights, eight, a, row, to); break;
            case 3: multiply_few<Format, 3>(weights, eight, a, row, to); break;
            case 4: multiply_few<Format, 4>(weights, eight, a, row, to); break;
        }
    }
}

// Dot products take numbers without signs from one side: 128 more than those with signs, as what kOffset makes up for.
template <class Format> struct WithoutSigns : Format {
    static constexpr int kOffset = 128, kHighest = 255;
    static constexpr bool kSigned = false;
    GGPIPE_UNPACK(const Source & rows, const Emit & emit) {
        Format::unpack(rows, [&](int u, const V * numbers, F scale, F minimum) GGPIPE_AVX2 GGPIPE_INLINE {
            V higher[Format::kUnit / 4];
            for (int i = 0; i < Format::kUnit / 4; i++) higher[i] = _mm256_xor_si256(numbers[i], all_bytes(-128));
            emit(u, higher, scale, minimum);
        });
    }
};

template <class Numbered> const Kernel * kernel_with() {
    using Format = std::conditional_t<kDots && Numbered::kSigned, WithoutSigns<Numbered>, Numbered>;
    static constexpr Kernel kernel{kDots ? "AVX-VNNI" : "AVX2", Format::From::kGroup > 1, kTileRows, sizeof(Numbers<Format>),
                                   quantize<Format>, multiply<Format>, nullptr};
    return &kernel;
}
inline const Kernel * kernel_of(ggml_type type, bool is_repacked) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return kernel_with<NAME>();
#define GGPIPE_REPACKED_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return kernel_with<Repacked##NAME>();
    if (is_repacked) {
        switch (type) {
            GGPIPE_FOR_REPACKED_FORMATS(GGPIPE_REPACKED_KERNEL)
            default: return nullptr;
        }
    }
    switch (type) {
        GGPIPE_FOR_FORMATS(GGPIPE_KERNEL)
        default: return nullptr;
    }
#undef GGPIPE_KERNEL
#undef GGPIPE_REPACKED_KERNEL
}

}  // namespace ggpipe::GGPIPE_QUADS
#endif
