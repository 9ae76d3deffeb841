// Attention and its indexers with AVX-512; see attention_lanes.h and indexer_lanes.h.
#include "attention.h"
#include "indexer.h"

#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "fast.h"
#include "vectors.h"

#define GGPIPE_TARGET __attribute__((target("arch=x86-64-v4")))

namespace ggpipe {

namespace {
#include "vectors_avx512.h"

constexpr int kManyLanes = 4, kManySums = 16;  // of 32 registers

#include "attention_lanes.h"
#include "indexer_lanes.h"
#include "latent_lanes.h"

}  // namespace

GGPIPE_TARGET void avx512_attention(const AttentionTask & task) { Attention(task).run(); }
GGPIPE_TARGET void avx512_latent_attention(const AttentionTask & task, const LatentHead & head) { LatentAttention(task, head).run(); }
GGPIPE_TARGET void avx512_indexer(const IndexerTask & task) { Indexer(task).run(); }

}  // namespace ggpipe
#else
void ggpipe::avx512_attention(const AttentionTask &) {}
void ggpipe::avx512_latent_attention(const AttentionTask &, const LatentHead &) {}
void ggpipe::avx512_indexer(const IndexerTask &) {}
#endif
