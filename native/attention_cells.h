// KV cells of all types as vectors. attention_lanes.h includes this, where F and the functions on it are defined.
//
// Numbers are exactly those of ggml's blocks: 8 bits times a scale of 16 bits fit into a float.

constexpr int kBlock = 32;  // columns of a quantized block

constexpr bool is_quantized(ggml_type type) { return type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_BF16; }
constexpr bool has_minima(ggml_type type) { return type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1; }

// Columns of a key, and one more for each block if blocks have minima, which are multiplied apart.
inline int64_t key_columns(const ggml_tensor * keys) { return keys->ne[0] + (has_minima(keys->type) ? keys->ne[0] / kBlock : 0); }

GGPIPE_TARGET GGPIPE_INLINE inline float half_at(const uint8_t * from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return _cvtsh_ss(half);
}

// kWidth floats of a row.
template <ggml_type T> GGPIPE_TARGET GGPIPE_INLINE inline F floats_at(const uint8_t * from) {
    if constexpr (T == GGML_TYPE_F16) return widened((const uint16_t *) from);
    if constexpr (T == GGML_TYPE_BF16) {
        uint16_t halves __attribute__((vector_size(2 * kWidth)));
        memcpy(&halves, from, sizeof halves);
        return (F) (__builtin_convertvector(halves, Unsigned<kWidth>) << 16);
    }
    return load((const float *) from);
}

// A block of a quantized row, without its minimum. The scale, and in some types the minimum, come first, then fifth bits, then
// numbers: of 4 bits those of the first 16 columns in the lower halves of bytes.
template <ggml_type T> GGPIPE_TARGET GGPIPE_INLINE inline void unpack(const uint8_t * block, F * to) {
    constexpr bool has_fifth = T == GGML_TYPE_Q5_0 || T == GGML_TYPE_Q5_1;
    const uint8_t * fifths = block + (has_minima(T) ? 4 : 2), * numbers = fifths + (has_fifth ? 4 : 0);
    const F scale = all(half_at(block));
    for (int i = 0; i < kBlock / kWidth; i++) {
        const int column = i * kWidth;
        const uint8_t * from = numbers + (T == GGML_TYPE_Q8_0 ? column : column % 16);
        __m128i n = kWidth == 16 ? _mm_loadu_si128((const __m128i *) from) : _mm_loadl_epi64((const __m128i *) from);
        if constexpr (T != GGML_TYPE_Q8_0) n = _mm_and_si128(_mm_srli_epi16(n, column / 16 * 4), _mm_set1_epi8(15));
        if constexpr (has_fifth) {
            uint16_t bits;
            memcpy(&bits, fifths + column / 8, sizeof bits);
            const __m128i each = _mm_set1_epi64x(0x8040201008040201);
            const __m128i bytes = _mm_shuffle_epi8(_mm_cvtsi32_si128(bits), _mm_set_epi64x(0x0101010101010101, 0));
            n = _mm_or_si128(n, _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(bytes, each), each), _mm_set1_epi8(16)));
        }
        if constexpr (T == GGML_TYPE_Q4_0) n = _mm_sub_epi8(n, _mm_set1_epi8(8));
        if constexpr (T == GGML_TYPE_Q5_0) n = _mm_sub_epi8(n, _mm_set1_epi8(16));
        if constexpr (T == GGML_TYPE_IQ4_NL) {
            n = _mm_shuffle_epi8(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), n);
        }
        to[i] = integers(n) * scale;
    }
}

// Rows of `width` numbers as n vectors each; missing numbers are 0. With `kApart`, minima come after a row's numbers.
template <ggml_type T, bool kApart>
GGPIPE_TARGET __attribute__((noinline)) void widen(const uint8_t * const * rows, int64_t width, int n_rows, F * to, int64_t n) {
    for (int c = 0; c < n_rows; c++, to += n) {
        if constexpr (is_quantized(T)) {
            constexpr int N = kBlock / kWidth;
            const size_t bytes = ggml_type_size(T);
            for (int64_t d = width / kWidth; d < n; d++) to[d] = F{};
            for (int64_t b = 0; b < width / kBlock; b++) {
                unpack<T>(rows[c] + b * bytes, to + b * N);
                if constexpr (!has_minima(T)) continue;
                const float minimum = half_at(rows[c] + b * bytes + 2);
                if constexpr (kApart) ((float *) (to + width / kWidth))[b] = minimum;
                for (int i = 0; !kApart && i < N; i++) to[b * N + i] += all(minimum);
            }
        } else {
            constexpr int kBytes = T == GGML_TYPE_F32 ? 4 : 2;
            const int64_t n_whole = width / kWidth;
            for (int64_t d = 0; d < n_whole; d++) to[d] = floats_at<T>(rows[c] + d * kWidth * kBytes);
            if (n == n_whole) continue;
            uint8_t rest[kWidth * kBytes] = {};
            memcpy(rest, rows[c] + n_whole * kWidth * kBytes, (width - n_whole * kWidth) * kBytes);
            to[n_whole] = floats_at<T>(rest);
        }
    }
}
template <bool kApart>
GGPIPE_TARGET void widen(const ggml_tensor * cells, const uint8_t * const * rows, int n_rows, F * to, int64_t n) {
    switch (cells->type) {
#define GGPIPE_CASE(TYPE) case GGML_TYPE_##TYPE: return widen<GGML_TYPE_##TYPE, kApart>(rows, cells->ne[0], n_rows, to, n);
        GGPIPE_CELLS(GGPIPE_CASE)
#undef GGPIPE_CASE
        default: break;  // see can_attend
    }
}

// Rounds a query as ggml does before it multiplies keys: to blocks of 8 bits, or to BF16. If keys have minima, the sums of the
// blocks, rounded to 16 bits, follow the query.
GGPIPE_TARGET GGPIPE_INLINE inline void round_for(const ggml_tensor * keys, F * query, int64_t n) {
    if (keys->type == GGML_TYPE_BF16) {
        for (int64_t d = 0; d < n; d++) {
            const Unsigned<kWidth> bits = (Unsigned<kWidth>) query[d];
            query[d] = (F) ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
        }
    }
    if (!is_quantized(keys->type)) return;
    constexpr int N = kBlock / kWidth;
    const auto as_half = [](float x) GGPIPE_TARGET GGPIPE_INLINE { return _cvtsh_ss(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); };
    float * sums = (float *) query + keys->ne[0];
    for (int64_t b = 0; b < keys->ne[0] / kBlock; b++, query += N) {
        F most = {};
        for (int i = 0; i < N; i++) {
            const F size = query[i] < 0 ? -query[i] : query[i];
            most = size > most ? size : most;
        }
        const float high = maximum(most), scale = high / 127;
        const F inverse = all(high > 0 ? 127 / high : 0);
        for (int i = 0; i < N; i++) query[i] = rounded(query[i] * inverse);
        if (has_minima(keys->type)) {
            float sum = 0;  // of integers
            for (int d = 0; d < kBlock; d++) sum += ((const float *) query)[d];
            sums[b] = as_half(sum * scale);
        }
        for (int i = 0; i < N; i++) query[i] *= all(as_half(scale));
    }
}
