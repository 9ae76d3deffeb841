// What products of weights add to results, with AVX2 or AVX-VNNI, and products with a few rows of activations; see products.cpp.
#pragma once

#ifdef __x86_64__
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "quad_activations.h"
#include "quad_few_bits.h"

namespace ggpipe::GGPIPE_QUADS {

// Compilers would add up products in another order, for which there are not enough registers.
GGPIPE_AVX2 GGPIPE_INLINE inline void in_this_order(V & sum) { asm("" : "+x"(sum)); }

// ---- what products in lanes add to a result: the same operations in the same order for any number of rows ----

// Without kSuper: those of a unit.
template <class Format>
GGPIPE_AVX2 GGPIPE_INLINE inline F with_unit(F sum, V products, const Numbers<Format> & x, int u, F scale, F minimum) {
    if constexpr (Format::kOffset != 0) products = sum_of(products, _mm256_set1_epi32(x.starts[u]));
    sum = _mm256_fmadd_ps(floats(products), _mm256_mul_ps(scale, _mm256_broadcast_ss(&x.scales[u])), sum);
    if constexpr (Format::kHasMinima) sum = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(&x.sums[u]), sum);
    return sum;
}
// Sums of units of activations, multiplied with pairs of those of the weights.
template <class Format> GGPIPE_AVX2 GGPIPE_INLINE inline V with_sums(const Numbers<Format> & x, const V * pairs) {
    V total = _mm256_setzero_si256();
    for (int i = 0; i < kChunk / Format::kUnit / 2; i++) {
        int32_t pair;
        memcpy(&pair, x.sums + 2 * i, sizeof pair);
        total = with_pairs(total, pairs[i], _mm256_set1_epi32(pair));
    }
    return total;
}
// With kSuper: those of a chunk, times the scales of units.
template <class Format, bool kHasOffset = Format::kOffset != 0>
GGPIPE_AVX2 GGPIPE_INLINE inline F with_block(F sum, V products, const Numbers<Format> & x, const Block & block) {
    if constexpr (kHasOffset) {
        const V offset = _mm256_mullo_epi32(with_sums(x, block.scales), _mm256_set1_epi32(Format::kOffset));
        products = _mm256_sub_epi32(products, offset);
    }
    const F scale = _mm256_broadcast_ss(&x.scale);
    sum = _mm256_fmadd_ps(floats(products), _mm256_mul_ps(block.scale, scale), sum);
    if constexpr (Format::kHasMinima) {
        sum = _mm256_fmadd_ps(floats(with_sums(x, block.minima)), _mm256_mul_ps(block.minimum, scale), sum);
    }
    return sum;
}

// Sums that are multiplied by integer scales must fit into 16 bits: how many products with four columns do.
template <class Format> constexpr int dots_at_once(int n) {
    while (Format::kSuper && n * 4 * 127 * Format::kHighest > INT16_MAX) n /= 2;
    return n;
}
// How many products with two columns do.
template <class Format> constexpr int twos_at_once(int n, int highest = Format::kHighest) {
    while (!Format::kSigned && n * 2 * 127 * highest > INT16_MAX) n /= 2;
    return n;
}
template <class Format> constexpr bool kByFours = kDots && dots_at_once<Format>(2) == 2;  // else, by twos there are fewer instructions

// ---- a few rows of activations: quads, as they are unpacked ---------------------------------------------
template <class Format, int R> struct QuadSums {
    const Numbers<Format> * x[R];
    V a[R], b[R];  // kSuper: integers of the chunk so far
    F sums[R];

    GGPIPE_AVX2 GGPIPE_INLINE QuadSums(const Activations & all, int64_t chunk, int64_t row, const F * results) {
        GGPIPE_UNROLLED(r, R) {
            x[r] = (const Numbers<Format> *) all.numbers + chunk * all.n_rows + row + r;
            a[r] = b[r] = _mm256_setzero_si256();
            sums[r] = results[r];
        }
    }
    static constexpr int kEights = Format::kUnit / 8;
    static constexpr int kHighest = Format::kSignsApart ? Format::kOffset : Format::kHighest;
    static constexpr int kAtOnce = kByFours<Format> ? dots_at_once<Format>(kEights) : twos_at_once<Format>(kEights, kHighest);
    // Products with a unit, or a part of it: pairs of 16-bit numbers, or if kSigned or kByFours, 32-bit numbers.
    GGPIPE_AVX2 GGPIPE_INLINE void multiply(int u, int part, const V * quads, const V * signs, V * to_a, V * to_b) const {
        GGPIPE_UNROLLED(i, kAtOnce) {
            GGPIPE_UNROLLED(r, R) {
                const int at = part * kAtOnce + i;
                int64_t eight;
                memcpy(&eight, x[r]->numbers + u * Format::kUnit + 8 * at, sizeof eight);
                V for_a = _mm256_set1_epi64x(eight), for_b = for_a;
                if constexpr (Format::kSignsApart) {
                    for_a = _mm256_sign_epi8(for_a, signs[2 * at]);
                    for_b = _mm256_sign_epi8(for_b, signs[2 * at + 1]);
                }
                add(quads[2 * at], for_a, i == 0, to_a[r]);
                add(quads[2 * at + 1], for_b, i == 0, to_b[r]);
            }
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void add(V quad, V eight, bool is_first, V & to) {
        if constexpr (Format::kSigned) {
            const V products = signed_products(quad, _mm256_abs_epi8(quad), eight);
            to = is_first ? products : sum_of(to, products);
        } else {
            add_products<kByFours<Format>>(quad, eight, is_first, to);
        }
        in_this_order(to);
    }
    GGPIPE_AVX2 GGPIPE_INLINE void add(int u, const V * quads, F scale, F minimum) {
        V to_a[R], to_b[R];
        multiply(u, 0, quads, nullptr, to_a, to_b);
        GGPIPE_UNROLLED(r, R) {
            if constexpr (!Format::kSigned && !kByFours<Format>) {
                to_a[r] = _mm256_madd_epi16(to_a[r], _mm256_set1_epi16(1));
                to_b[r] = _mm256_madd_epi16(to_b[r], _mm256_set1_epi16(1));
            }
            sums[r] = with_unit(sums[r], in_lanes(to_a[r], to_b[r]), *x[r], u, scale, minimum);
        }
    }
    template <int kSecond> GGPIPE_AVX2 GGPIPE_INLINE void add(int u, const V * quads, const V * signs, V pair) {
        GGPIPE_UNROLLED(part, kEights / kAtOnce) {
            V to_a[R], to_b[R], scale_a, scale_b;
            multiply(u, part, quads, signs, to_a, to_b);
            in_quads<kSecond, kByFours<Format>>(pair, scale_a, scale_b);
            GGPIPE_UNROLLED(r, R) {
                a[r] = with_pairs(a[r], to_a[r], scale_a);
                b[r] = with_pairs(b[r], to_b[r], scale_b);
            }
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE void end(const Block & block, F * results) {
        GGPIPE_UNROLLED(r, R) {
            if constexpr (Format::kSuper) {
                constexpr bool kHasOffset = Format::kOffset != 0 && !Format::kSignsApart;
                sums[r] = with_block<Format, kHasOffset>(sums[r], in_lanes(a[r], b[r]), *x[r], block);
            }
            results[r] = sums[r];
        }
    }
};

template <class Format, int R, class Prefetch>
GGPIPE_AVX2 GGPIPE_INLINE inline void multiply_quads(const typename Format::From & from, const Activations & x, int64_t chunk,
                                                    int64_t row, F * results, const Prefetch & prefetch) {
    QuadSums<Format, R> sums(x, chunk, row, results);
    Block block;
    if constexpr (Format::kSuper) {
        Format::read(from, block);
        Format::unpack(from, [&](int u, const V * quads, const V * signs = nullptr) GGPIPE_AVX2 GGPIPE_INLINE {
            if (u % 2) sums.template add<1>(u, quads, signs, block.scales[u / 2]);
            else sums.template add<0>(u, quads, signs, block.scales[u / 2]);
            prefetch(u);
        });
    } else {
        Format::unpack(from, [&](int u, const V * quads, F scale, F minimum) GGPIPE_AVX2 GGPIPE_INLINE {
            sums.add(u, quads, scale, minimum);
            prefetch(u);
        });
    }
    sums.end(block, results);
}

}  // namespace ggpipe::GGPIPE_QUADS
#endif
