// What of a graph is computed between two waits of all threads.
//
// ggml's threads wait for each other after each operation, some 40 times in a layer of a mixture of experts. Most of these are
// small operations of one row, which one thread computes while the others wait anyway, and products that do not depend on each
// other. Here such products are computed together, and small operations one after another on one thread.
#pragma once

#include <vector>

#include "fast.h"

namespace ggpipe {

// One wait, and what is computed before it.
struct Step {
    struct Own {
        ggml_tensor * node;
        ggml_custom_op_t compute;
    };
    ggml_tensor * place = nullptr;     // the first of its nodes
    std::vector<Own> own;              // of our operations, which all threads compute; none depends on another, nor on `small`
    std::vector<ggml_tensor *> small;  // of ggml's, which the first thread computes in this order
};

// The steps of a graph that contain operations of our own, or several of ggml's, which computes all others in their places.
// With one thread, nobody waits, and each operation of our own is a step.
std::vector<Step> steps_of(ggml_cgraph * graph, int n_threads, const FastGraph & fast);

// A thread's part of a step.
void compute_step(const Step & step, int thread, int n_threads, FastGraph & fast);

}  // namespace ggpipe
