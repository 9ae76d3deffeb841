// A graph in steps, between which all threads wait for each other.
//
// ggml's threads wait after almost every operation, some 40 times in a layer of a mixture of experts. In a run of one row, most
// operations are small, so that one thread computes them while the others wait anyway, or products that do not depend on each
// other. Here such products are computed together, and small operations one after another on one thread.
#pragma once

#include <memory>
#include <vector>

#include "fast.h"
#include "ggml-backend.h"

namespace ggpipe {

// Whether ggml would compute a node.
bool computes(const ggml_tensor * node);

class OnOneThread;

// The operations between two waits.
struct Step {
    struct Own {
        ggml_tensor * node;
        ggml_custom_op_t compute;  // nullptr: ggml does
    };
    ggml_tensor * place = nullptr;  // the first of its nodes
    std::vector<Own> own;           // of our operations, which all threads compute; none depends on another, nor on `small`
    std::vector<Own> small;         // in their order
    std::unique_ptr<OnOneThread> one_thread = nullptr;  // computes `small`
};

// Operations that one thread computes one after another.
class OnOneThread {
   public:
    explicit OnOneThread(const std::vector<Step::Own> & operations);
    void compute() const;
    static void prepare();  // in each thread, before what keeps such objects

   private:
    std::vector<ggml_tensor> copies_;  // the nodes themselves are no operations while the graph is computed
    std::vector<ggml_tensor *> nodes_;
    std::unique_ptr<void, void (*)(ggml_backend_graph_plan_t)> plan_;
};

// The steps of a graph that contain operations of our own, or several of ggml's, which computes all others in their places.
// With one thread, nobody waits, and each operation of our own is a step.
std::vector<Step> steps_of(ggml_cgraph * graph, int n_threads, const FastGraph & fast);

// A thread's part of a step.
void compute_step(const Step & step, int thread, int n_threads, FastGraph & fast);

}  // namespace ggpipe
