// Weights that do not fit into memory: they are read from their files while the layers before them are computed.
//
// Each has addresses of its own, which take up memory only as long as it is wanted. Matrices that every run needs come round in the
// same order, so whichever has just been used is the last to be needed again: a cache that keeps what was used last would have none
// of them when its turn comes. So as many as fit are kept for good, spread evenly among the others, and those are read ahead in
// their order into a window. Of a mixture's experts, those that rows were routed to are read, and the ones used most often stay.
//
// Readers go past the page cache (O_DIRECT), which would only hold a second copy.
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

    // Of files, where tensors are by name. memory: for all of them, in bytes. Throws std::runtime_error.
    StreamedWeights(const std::vector<std::string> & paths, std::map<std::string, Place> places, size_t memory, int n_readers);
    ~StreamedWeights();

    // While loading: a product that reads a weight, as libllama asks for it; and whether a weight is one of ours, which then has
    // addresses. Throws std::runtime_error if there are none left.
    void used_by(const ggml_tensor * op);
    bool add(ggml_tensor * tensor);
    // The same for a part of a weight: pieces of the same size, one after another in memory.
    struct Pieces {
        size_t size, from, times, step;  // from: the first one's place in the weight; step: from one to the next there
    };
    bool add(ggml_tensor * part, const std::string & name, const Pieces & pieces);

    // After loading: decide what is kept, and begin to read it. Returns the bytes of memory that are needed at least; if there are
    // fewer, nothing is read.
    size_t begin();
    size_t memory() const { return memory_; }
    // Wait for the next weights that are kept. Returns their bytes; nothing at the end. Throws std::runtime_error if they cannot be read.
    std::optional<size_t> load_next();

    // Compute a graph in parts, each as far as its weights are there. `stops`: whether to give up waiting.
    ggml_status compute(ggml_cgraph * graph, const Compute & compute, const std::function<bool()> & stops);
    void wake();  // look at `stops` again

    bool is_whole() const { return is_whole_; }  // everything is kept
    size_t bytes_to_load() const { return bytes_to_load_; }
    size_t bytes_streamed() const { return bytes_streamed_; }  // of matrices that each run reads
    std::string problem() const;                               // why weights could not be read
    struct Times {
        uint64_t bytes_read;
        double waited_s;
        uint64_t n_guessed, n_right;  // experts that were read by guesses, and those of them that were used
    };
    Times take_times();  // since the last call

   private:
    enum class State { Absent, Reading, Present };
    struct Unit {  // what is read together: a matrix, or one expert's part of a tensor
        int file;
        uint64_t offset;
        char * data;
        size_t n_bytes;
        size_t skew, size;  // bytes before it in its first page of the file, and in all its pages
        size_t number;      // in the order of `add`
        bool is_expert, in_layer, in_huge_pages, is_kept = false;
        char * begin, * end;  // whole pages that it shares with no other unit
        ptrdiff_t n_given = 0;  // bytes of these that others left to it
        State state = State::Absent;
        int n_holds = 0, n_chunks_left = 0;
        size_t next_chunk = 0;
        double use = 0;  // of experts: the logarithm of how often it was used, later uses counting more
        double used_in = 0, held_in = 0, guessed_in = 0;  // the last runs
    };
    struct Tensor {
        std::vector<Unit *> units;  // of each expert, or a single one
        bool is_experts;
    };
    struct Guess {  // of a layer's experts
        double run;
        std::vector<float> rows;
        const float * router;
        int64_t n_columns, n_experts, n_used;
        std::vector<const Tensor *> tensors;
        std::vector<int32_t> experts() const;
    };
    struct Less {  // experts by their use
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
    // What a node reads of ours and is not kept. Nothing: nodes from `from` on have to be computed to know its experts.
    std::optional<Units> needs_of(const ggml_cgraph * graph, int from, int node) const;
    Units soon(const ggml_cgraph * graph, int node) const;
    void guess(const ggml_cgraph * graph, int node);
    void read_guessed(Lock & lock);
    void sort_ring(const ggml_cgraph * graph);
    void touch(Unit * unit);
    void hold(Unit * unit);
    void release(Units & units);
    bool wait_for(Lock & lock, const Units & units, const Units & later, const std::function<bool()> & stops);
    std::string problem_() const;

    std::vector<std::string> paths_;
    std::vector<std::pair<int, int>> files_;  // descriptors of each: past the page cache (-1: impossible), and through it
    std::map<std::string, Place> places_;
    std::map<std::string, ggml_op> ops_;
    std::vector<std::pair<void *, size_t>> reserved_;
    size_t memory_, window_ = 0, cache_ = 0;  // bytes for all, for matrices that are read ahead, for experts
    bool is_whole_ = false;
    size_t bytes_to_load_ = 0, bytes_streamed_ = 0;

    std::deque<Unit> units_;
    std::unordered_map<const ggml_tensor *, Tensor> tensors_;

    mutable std::mutex mutex_;  // for all below, and the state of units
    std::condition_variable work_, done_;
    std::vector<Unit *> ring_;          // matrices that are read ahead, in their order
    std::map<const Unit *, size_t> at_;  // places in it
    size_t next_ = 0;                   // in it, that is used next
    std::set<Unit *, Less> idle_;       // experts that are there, and not in use
    size_t in_window_ = 0, in_cache_ = 0;
    size_t n_to_load_ = 0, n_loaded_ = 0, n_told_ = 0, bytes_loaded_ = 0;
    std::deque<Unit *> to_load_, now_, ahead_;  // to read: while loading, waited for, ahead
    double clock_ = 0;                  // in runs
    std::deque<Guess> guesses_;
    double n_guessed_ = 0, n_right_ = 0;  // as in Times, later ones counting more
    int error_ = 0, error_file_ = 0;
    bool stopping_ = false;
    Times times_{};
    std::vector<std::thread> readers_;
};

}  // namespace ggpipe
