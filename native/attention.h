// Attention whose rows share the work on KV cells; see attention.cpp.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

namespace ggpipe {

// As ggml_backend_graph_compute on a CPU backend with `n_threads`, with flash attention computed here where that is faster.
ggml_status compute_fast(ggml_backend_t backend, ggml_cgraph * graph, int n_threads);

}  // namespace ggpipe
