// Graphs of a group's stage that come again; see group_graphs.cpp.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "abi.h"
#include "ggml.h"

namespace ggpipe {

struct Group;

constexpr uint64_t kRepeatedUids = uint64_t(1) << 63;  // of graphs that are computed without the meta device; ggml counts from 1

class GroupGraphs {
   public:
    explicit GroupGraphs(Group & group) : group_(group) {}
    void adopt(ggml_backend_dev_t meta);       // from now on, what ggml's meta device is asked comes here first
    void adopt(ggml_backend_buffer_t buffer);  // of the meta device
    void begin_run() { placed_.clear(); }      // an earlier run may have ended between placing and computing
    void put_back();                           // the current graph's slices, where those of another context's graphs may have been made
    bool is_recording() const { return recording_; }  // the meta device is asked what it would do: nothing is computed yet
    bool may_pause() const { return may_pause_; }     // another context's graphs may be made between the steps of this one

    int n_new = 0;  // graphs that were not known

    // What the meta device does for us while it is asked for something new.
    void made(int part, ggml_tensor * slice);
    void computes(ggml_backend_t ours, ggml_cgraph * graph);
    void sums(ggml_tensor * slice);

   private:
    struct Tensor {
        ggml_tensor * whole;           // libllama's
        ggml_tensor whole_bytes;       // when it was placed
        std::vector<int64_t> columns;  // of each part's slice
        ggml_tensor * slice;           // ours
        ggml_tensor slice_bytes;       // when it was computed
    };
    struct Step { size_t end; ggml_tensor * sum; uint64_t uid; };  // nodes before `end` are computed, then a slice is summed, if any
    struct Split {                                   // what ggml's scheduler has computed at a time
        const ggml_tensor * first = nullptr;
        int n_nodes = 0;
        std::shared_ptr<ggml_context> memory;  // of `uses`
        ggml_cgraph * uses = nullptr;          // how often each of `nodes` is used
        std::vector<ggml_tensor *> nodes;
        std::vector<Step> steps;
    };
    struct Graph {
        std::vector<Tensor> tensors;  // as they were placed
        std::unordered_map<const ggml_tensor *, size_t> index;
        std::list<Split> splits;
        bool complete = false;  // all there is to it is known

        Tensor * find(const ggml_tensor * whole);
        bool is_of(const std::vector<ggml_tensor *> & placed) const;
    };

    static ggml_backend_t init(ggml_backend_dev_t meta, const char * params);
    static ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t type, size_t size);
    static ggml_status place(ggml_backend_buffer_t buffer, ggml_tensor * whole);
    static void write(ggml_backend_buffer_t buffer, ggml_tensor * whole, const void * p, size_t at, size_t n);
    static void read(ggml_backend_buffer_t buffer, const ggml_tensor * whole, void * p, size_t at, size_t n);
    static ggml_status compute(ggml_backend_t meta, ggml_cgraph * graph);

    Graph * current();
    Tensor * find(const ggml_tensor * whole);  // in the current graph
    void make();
    bool record(Graph & graph, Split & split, ggml_backend_t meta, ggml_cgraph * nodes);
    void keep_independent(ggml_cgraph * graph);
    ggml_status repeat(Split & split);

    Group & group_;
    ggml_backend_reg reg_ = {};           // the meta device's, which has none
    std::vector<ggml_tensor *> placed_;   // since the last graph
    std::list<Graph> graphs_;             // the current one, if any, comes first
    bool may_pause_ = false;
    Tensor * making_ = nullptr;           // of the current graph's
    Split * recording_ = nullptr;
    std::unordered_set<const ggml_tensor *> to_compute_, lacking_;  // of the recorded split; without their sources
    ggml_backend_t ours_ = nullptr;
};

}  // namespace ggpipe
