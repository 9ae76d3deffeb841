// Attention with AVX2; see attention_lanes.h.
#include "attention.h"

#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "fast.h"
#include "vectors.h"

#define GGPIPE_TARGET __attribute__((target("avx2,fma,f16c")))

namespace ggpipe {

namespace {
#include "vectors_avx2.h"

constexpr int kManyLanes = 3, kManySums = 12;  // of 16 registers

#include "attention_lanes.h"

}  // namespace

GGPIPE_TARGET void avx2_attention(const AttentionTask & task) { Attention(task).run(); }

}  // namespace ggpipe
#else
void ggpipe::avx2_attention(const AttentionTask &) {}
#endif
