// Grids: tables of 8 or 4 numbers each, of which the blocks of some quantized types have indices.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

namespace ggpipe {

// Read from ggml once, by unpacking a block for each entry. Numbers are bytes, in the order of their columns:
//   IQ2_XXS, IQ2_XS, IQ2_S   8 numbers, without their signs
//   IQ3_XXS                  4 numbers, without their signs; halves of ggml's, all of which are even
//   IQ3_S                    4 numbers, without their signs
//   IQ1_S                    8 times 8 numbers of -1, 0 and 1, and 9 more; IQ1_M has the same
template <ggml_type kType> const uint64_t * eights_of_grid();
template <ggml_type kType> const uint32_t * fours_of_grid();

// The same with 16 bits an entry: 8 fields of 2 bits, or 4 of 4, which tell which of the grid's few values a number is. The
// highest of 4 bits is 0.
struct PackedGrid {
    alignas(64) uint16_t entries[2048];
    alignas(16) uint8_t values[16];  // by fields; of those of 2 bits, also by four times the field
};
template <ggml_type kType> const PackedGrid & packed_grid();

}  // namespace ggpipe
