// Gated delta nets and state spaces with AVX2; see delta_net_lanes.h and state_space_lanes.h.
#include "recurrent.h"

#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vectors.h"

#define GGPIPE_TARGET __attribute__((target("avx2,fma,f16c")))

namespace ggpipe {

namespace {
#include "vectors_avx2.h"

#include "vector_functions.h"

#include "delta_net_lanes.h"
#include "state_space_lanes.h"

}  // namespace

GGPIPE_TARGET void avx2_delta_net(const DeltaNetTask & task) { DeltaNet(task).run(); }
GGPIPE_TARGET void avx2_scan(const ScanTask & task) { StateSpace(task).run(); }

}  // namespace ggpipe
#else
void ggpipe::avx2_delta_net(const DeltaNetTask &) {}
void ggpipe::avx2_scan(const ScanTask &) {}
#endif
