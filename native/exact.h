// Graphs whose rows have the same bits in any company; see exact.cpp.
#pragma once

#include "cell_order.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace ggpipe {

// As ggml_backend_graph_compute on a CPU backend, with products that depend on the number of rows cut into parts that
// do not, and with attention that reads KV cells in order.
ggml_status compute_exact(ggml_backend_t backend, ggml_cgraph * graph, CellOrder & cell_order);

// Repacked weights of this type are multiplied in an order that depends on the number of rows.
bool repacking_breaks(ggml_type type);

}  // namespace ggpipe
