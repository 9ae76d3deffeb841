// One thread's part of the indexers of sparse attention; see indexer.cpp.
#pragma once

#include <cstdint>

#include "attention.h"
#include "ggml.h"

namespace ggpipe {

constexpr int64_t kIndexerRows = 4;

struct IndexerTask {  // the scores of at most kIndexerRows rows at some cells, the first of which is a multiple of kTile
    const ggml_tensor * node;
    int64_t first_row, end_row, first_cell, end_cell;
    Scratch & scratch;
};
void avx512_indexer(const IndexerTask & task);
void avx2_indexer(const IndexerTask & task);

}  // namespace ggpipe
