// Weights that do not fit into memory are read from the file while earlier layers are computed.
//
// Each weight has its own address range, and takes up memory only while it is needed. Runs use dense matrices in a fixed cyclic
// order, for which an LRU cache is the worst choice: it evicts each of them just before its next use. So as many as fit stay in
// memory, spread evenly over the layers, and the others are prefetched in order into a window. Of a mixture's experts, only those
// that rows are routed to are read, and the most used ones stay.
//
// Readers bypass the page cache (O_DIRECT), which would only hold a second copy.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"

namespace ggpipe {

class StreamedWeights {
   public:
    struct Place {
        int file;
        uint64_t offset;
        size_t size;
    };
    using Compute = std::function<ggml_status(ggml_cgraph *)>;

    // paths: the model's files. places: of its tensors, by name. memory: for all weights, in bytes. Throws std::runtime_error.
    StreamedWeights(const std::vector<std::string> & paths, std::map<std::string, Place> places, size_t memory, int n_readers);
    ~StreamedWeights();

    // While loading: `used_by` learns which weights are operands of products. `add` gives such a weight its address range, and returns
    // false for others. Throws std::runtime_error if there are no addresses.
    void used_by(const ggml_tensor * op);
    bool add(ggml_tensor * tensor);
    // The same for one part of a weight in a group: pieces of equal size, contiguous in memory.
    struct Pieces {
        size_t size, from, times, step;  // from: the first one's place in the weight; step: from one to the next there
    };
    bool add(ggml_tensor * part, const std::string & name, const Pieces & pieces);

    // Another weight stays in memory, and takes this much of it.
    void stays(size_t bytes) { stays_ += bytes; }

    // After loading: choose the weights that stay in memory, and begin to read them. Returns the minimum memory in bytes; nothing is
    // read if there is less.
    size_t begin();
    size_t memory() const { return memory_; }
    // Wait for more of these weights. Returns their bytes; nothing at the end. Throws std::runtime_error if they cannot be read.
    std::optional<size_t> load_next();

    // Compute a graph in parts, each up to the next weight that has to be waited for. `stops`: whether to give up waiting.
    ggml_status compute(ggml_cgraph * graph, const Compute & compute, const std::function<bool()> & stops);
    void wake();  // to check `stops` again

    bool is_whole() const { return is_whole_; }  // all weights stay in memory
    size_t bytes_to_load() const { return bytes_to_load_; }
    size_t bytes_streamed() const { return bytes_streamed_; }  // of matrices that each run reads
    std::string problem() const;                               // why weights could not be read
    struct Times {
        uint64_t bytes_read;
        double waited_s;
        uint64_t n_predicted, n_right;  // experts' matrices that were prefetched, and those of them that were used
    };
    Times take_times();  // since the last call

   private:
    enum class State { Absent, Reading, Present };
    struct Unit {  // the unit of reading and eviction: a matrix, or one expert's matrix in a tensor
        int file;
        uint64_t offset;
        char * data;
        size_t n_bytes;
        size_t skew, size;  // bytes before it in its first page of the file, and in all its pages
        size_t number;      // in the order of `add`
        bool is_expert, in_layer, in_huge_pages, is_kept = false;
        char * begin, * end;  // its whole pages that no other unit shares
        ptrdiff_t n_given = 0;  // bytes of these that have pages of evicted units
        State state = State::Absent;
        int n_holds = 0, n_chunks_left = 0;
        size_t next_chunk = 0;
        double use = 0;  // of experts: the logarithm of the number of uses, which decay
        double used_in = 0, held_in = 0, predicted_in = 0;  // the latest run of each
    };
    struct Tensor {
        std::vector<Unit *> units;  // of each expert, or a single one
        bool is_experts;
    };
    struct Prediction {  // of a layer's experts
        double run;
        std::vector<float> rows;
        const float * router;
        int64_t n_columns, n_experts, n_used;
        std::vector<const Tensor *> tensors;
        std::vector<int32_t> experts() const;
    };
    struct Less {  // of two experts, the one that is evicted first
        bool operator()(const Unit * a, const Unit * b) const { return a->use != b->use ? a->use < b->use : a < b; }
    };
    using Lock = std::unique_lock<std::mutex>;
    using Units = std::vector<Unit *>;

    size_t choose_kept(const Units & matrices, size_t n_expert_bytes);
    void request(Unit * unit, std::deque<Unit *> & list);
    int read(const Unit & unit, size_t from, size_t size, char * buffer) const;
    void read_all(char * buffer);
    bool look_ahead();
    bool make_window(size_t at);
    bool make_room(Unit * wanted);
    void drop(Unit * unit, Unit * wanted);

    const Tensor * find(const ggml_tensor * tensor) const;
    // The units that a node reads, but for those that always stay. Nothing: its experts are unknown until nodes from `from` on are
    // computed.
    std::optional<Units> needs_of(const ggml_cgraph * graph, int from, int node) const;
    Units soon(const ggml_cgraph * graph, int node) const;
    void predict(const ggml_cgraph * graph, int node);
    void read_predicted(Lock & lock);
    void sort_ring(const ggml_cgraph * graph);
    void touch(Unit * unit);
    void hold(Unit * unit);
    void release(Units & units);
    bool wait_for(Lock & lock, const Units & units, const Units & later, const std::function<bool()> & stops);
    std::string problem_() const;

    std::vector<std::string> paths_;
    std::vector<std::pair<int, int>> files_;  // descriptors of each: with O_DIRECT (-1: not supported), and without
    std::map<std::string, Place> places_;
    std::map<std::string, ggml_op> ops_;
    std::vector<std::pair<void *, size_t>> reserved_;
    size_t stays_ = 0;  // bytes of weights that are not streamed
    size_t memory_, window_ = 0, cache_ = 0;  // bytes: for all weights, for matrices that are prefetched, for experts
    bool is_whole_ = false;
    size_t bytes_to_load_ = 0, bytes_streamed_ = 0;

    std::deque<Unit> units_;
    std::unordered_map<const ggml_tensor *, Tensor> tensors_;

    mutable std::mutex mutex_;  // protects everything below, and the state of units
    std::condition_variable work_, done_;
    std::vector<Unit *> ring_;          // matrices that are prefetched, in the order of their use
    std::map<const Unit *, size_t> at_;  // positions in it
    size_t next_ = 0;                   // position in it of the next matrix to be used
    std::set<Unit *, Less> idle_;       // experts in memory that are not in use
    size_t in_window_ = 0, in_cache_ = 0;
    size_t n_to_load_ = 0, n_loaded_ = 0, n_told_ = 0, bytes_loaded_ = 0;
    std::deque<Unit *> to_load_, now_, ahead_;  // to read: while loading, on demand, prefetched
    double clock_ = 0;                  // in runs
    std::deque<Prediction> predictions_;
    double n_predicted_ = 0, n_right_ = 0;  // as in Times, but recent ones only
    int error_ = 0, error_file_ = 0;
    bool stopping_ = false;
    Times times_{};
    std::vector<std::thread> readers_;
};

}  // namespace ggpipe
