#include "grids.h"

#include <cmath>
#include <cstring>
#include <set>

namespace ggpipe {

namespace {
constexpr int kColumns = 256;

// Where a block has its first index. All other bits are 0, but for the block's scale, which is 1 and comes first.
struct Place {
    ggml_type type;
    int n;                // of indices
    int lower, upper;     // bytes with an index's lower 8 bits, and with those above
    float factor, added;  // what makes the grid's numbers of ggml's
};

template <class Entry> std::vector<Entry> grid(const Place & place) {
    const ggml_to_float_t unpack = ggml_get_type_traits(place.type)->to_float;
    std::vector<Entry> entries(place.n);
    std::vector<uint8_t> block(ggml_type_size(place.type));
    float numbers[kColumns];
    const ggml_fp16_t one = ggml_fp32_to_fp16(1);
    memcpy(block.data(), &one, sizeof one);
    for (int i = 0; i < place.n; i++) {
        block[place.lower] = i & 255;
        block[place.upper] = i >> 8;
        unpack(block.data(), numbers, kColumns);
        uint8_t bytes[sizeof(Entry)];
        for (size_t j = 0; j < sizeof bytes; j++) bytes[j] = std::lround(numbers[j] * place.factor + place.added);
        memcpy(&entries[i], bytes, sizeof bytes);
    }
    return entries;
}

template <class Entry> PackedGrid packed(const Entry * entries, int n) {
    constexpr int kNumbers = sizeof(Entry), kBits = 16 / kNumbers;
    const auto * numbers = (const uint8_t *) entries;
    const std::set<uint8_t> values(numbers, numbers + n * kNumbers);
    PackedGrid packed{};
    int field = 0;
    for (const uint8_t value : values) {
        packed.values[field] = value;
        if (kBits == 2) packed.values[4 * field] = value;
        for (int i = 0; i < n * kNumbers; i++) {
            if (numbers[i] == value) packed.entries[i / kNumbers] |= field << i % kNumbers * kBits;
        }
        field++;
    }
    return packed;
}
}  // namespace

#define GGPIPE_GRID(TYPE, NAME, ENTRY, N, ...)                                                              \
    template <> const ENTRY * NAME<GGML_TYPE_##TYPE>() {                                                      \
        static const std::vector<ENTRY> entries = grid<ENTRY>({GGML_TYPE_##TYPE, N, __VA_ARGS__});            \
        return entries.data();                                                                                \
    }                                                                                                         \
    template <> const PackedGrid & packed_grid<GGML_TYPE_##TYPE>() {                                          \
        static const PackedGrid grid = packed(NAME<GGML_TYPE_##TYPE>(), N);                                   \
        return grid;                                                                                          \
    }
GGPIPE_GRID(IQ2_XXS, eights_of_grid, uint64_t, 256, 2, 3, 8, 0)
GGPIPE_GRID(IQ2_XS, eights_of_grid, uint64_t, 512, 2, 3, 8, 0)
GGPIPE_GRID(IQ2_S, eights_of_grid, uint64_t, 1024, 2, 66, 8, 0)
GGPIPE_GRID(IQ1_S, eights_of_grid, uint64_t, 2048, 2, 34, 8, 8)
GGPIPE_GRID(IQ3_XXS, fours_of_grid, uint32_t, 256, 2, 3, 2, 0)
GGPIPE_GRID(IQ3_S, fours_of_grid, uint32_t, 512, 2, 66, 1, 0)

}  // namespace ggpipe
