// One stage's native half: its three ggml devices, the hooks that libllama's loader runs into, the wire.
//
// libllama places layers on devices by `tensor_split`. A stage gives it up to three, in this order:
//   UP     the layers before ours: weights never read, ops never run
//   LOCAL  our layers: every call goes on to the CPU backend
//   DOWN   the layers after ours: as UP
// ggml's scheduler then copies exactly the tensors that cross a device boundary, and those copies are the wire:
// a set_tensor on DOWN's buffer is "send to the next rank", a get_tensor on UP's "receive from the previous".
// All three offer one further buffer type, HOST, which libllama takes for the input embedding and for its own
// staging memory: so a later rank never reads the embedding, and unused staging memory is never touched.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "abi.h"
#include "compute.h"
#include "streamed.h"

namespace ggpipe {

using Range = std::pair<uintptr_t, size_t>;    // an address, and bytes from there
using Places = std::map<std::string, Range>;  // where each tensor's bytes are, in files that are mapped read-only

// Tensors of one run that crossed the boundary, packed one after another (see `wire.cpp`).
class Wire {
   public:
    void begin(const uint8_t * incoming, size_t size, size_t headroom);
    void put(const char * copy_name, const void * data, size_t size);  // name as the scheduler gives it to a copy
    // false: the run did not bring it. row: in a run of one token, its bytes; 0 where more tokens might not come one after
    // another.
    bool take(const char * tensor, void * data, size_t size, size_t row);
    std::vector<uint8_t> out;           // headroom, then what goes to the next rank
    std::vector<std::string> wanted;    // what UP was asked for, in order: the dry run compares it
    std::vector<size_t> wanted_rows;    // their `row`
    std::vector<std::string> produced;  // what DOWN was given, in order

   private:
    struct Frame { std::string_view name; const uint8_t * data; size_t size; };
    std::vector<Frame> in_;  // in their order, that are not taken yet
    std::vector<std::pair<size_t, size_t>> sent_;  // of what was put: where its data are in `out`, and how many bytes
};

struct Stage;
struct Group;
enum class Role { Up, Local, Down, Part };  // Part: what another rank of our group has of our layers

struct Device {  // a ggml device, its registry (libllama asks that for functions) and its buffer types
    Device(Stage * stage, Role role);
    Stage * stage;
    Role role;
    int part = 0;  // of a group
    int last_layer = -1;  // of its layers, where the next one is on another device
    ggml_backend_reg reg;
    ggml_backend_device dev;
    ggml_backend_buffer_type buft;  // weights, KV cells and activations of this side
    ggml_backend_buffer_type host;  // HOST, see above
};

// A buffer type for weights that the CPU backend repacks; see repacked.cpp.
struct Repacker {
    ggml_backend_buffer_type type;  // the first member
    ggml_backend_buffer_type_t real;
    Stage * stage;
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *) = nullptr;  // ggml's, as the next one
    void (*free_buffer)(ggml_backend_buffer_t) = nullptr;
};

// DeepSeek-V4 collects tokens in states until they become one KV cell. Their memory: tensors of LOCAL, each with a part for each sequence.
class CompressorStates {
   public:
    void add(ggml_tensor * tensor);  // if it is one; a second context has others of the same names, which are not used
    void copy(int from, int to) const;

   private:
    std::vector<ggml_tensor *> tensors_;
};

struct Stage {
    // first: it reads the input embedding: no rank is before this one, or it has MTP layers. repack: let the CPU backend repack weights. exact: reference kernels.
    // fast_kernels: our own kernels, where they can. touch_cells: KV cells get their memory when they are
    // made, not when they are used first.
    Stage(bool first, bool repack, bool exact, bool fast_kernels, bool touch_cells);

    const bool first, repack, exact, fast_kernels;
    bool touch_cells;
    Device up, local, down;
    std::shared_ptr<Group> group;  // where other ranks compute the same layers: each has a part of every weight

    // Loading: between the two calls, tensors of other ranks are hidden from libllama's loader. With `use_in_place`, so
    // are our own, which point into `file` instead of being read. The file stays mapped as long as the model exists. If libllama
    // has not loaded the model, its tensors no longer exist.
    void begin_load(Places file, bool use_in_place);
    void end_load(bool loaded);
    bool loading = false, use_in_place = false;
    Places file;
    ggml_status place_weight(ggml_tensor * tensor, Role role, bool host);
    std::unique_ptr<StreamedWeights> streamed;  // of LOCAL, where they may not fit into memory
    void hide(ggml_tensor * tensor);
    void add_mapped_range(const void * data, size_t size);
    std::vector<Range> mapped_ranges;              // of `file`, that weights use
    size_t mapped_bytes = 0, hidden_bytes = 0;
    std::vector<std::string> weights;              // names of those that this rank reads

    // Weights that are repacked after libllama has loaded, from `file`.
    ggml_backend_buffer_type_t * repackers();                       // nullptr-terminated
    const Repacker * repacker_of(const ggml_tensor * weight) const;  // while libllama asks which buffer type it may use
    void place_repacked(ggml_tensor * tensor);
    void begin_repacking();                 // no more buffers are made
    std::optional<size_t> repack_next();    // bytes of some more; std::nullopt at the end
    size_t bytes_to_repack = 0;             // of all of them

    // One run. `cancel` may come from another thread at any time.
    void begin_run(int64_t run, const uint8_t * incoming, size_t size, size_t headroom);
    void end_run();
    void cancel(int64_t run);
    bool aborted() const { return abort_run_ == current_run_; }
    bool running() const { return current_run_ != kNoRun; }

    // Where a run `pauses`, `at_pause` is called between two of its layers if a pause is wanted and due; see pauses.cpp. It
    // computes other runs in another context, between `pause` and `resume`.
    bool pauses = false;
    std::atomic<bool> wants_pause{false};
    bool pause_is_due();
    int pause_places = 0;  // in the last graph of such a run, or of any run of a group
    double continues = 0;  // times a pause: so long a run continues at least before the next one
    std::function<void()> at_pause;
    void pause();
    void resume();

    // Whether bytes are a result worth sending: LOCAL's own, or UP's that pass through.
    bool is_result(const void * data) const;
    std::map<const void *, size_t> buffers;  // LOCAL's own (non-weight) memory: addresses and bytes
    const void * passing = nullptr;          // where UP's last tensor went: a copy from there to DOWN passes through

    // The last hidden state of the rows that libllama gives logits of: its graph marks both as results.
    int64_t hidden_width = 0;      // numbers of a row; 0: it is not wanted
    bool skips_logits = false;     // nothing after it is needed
    std::vector<uint8_t> hidden;   // of the last run

    CellOrder cell_order;  // kept where `exact`
    CompressorStates states;
    Threads threads;       // of LOCAL
    Wire wire;
    int misplaced = 0;     // reads from DOWN: the cut runs through a layer
    int missing = 0;       // reads from UP that the run did not bring

   private:
    std::deque<Repacker> repackers_;
    std::vector<ggml_backend_buffer_type_t> repacker_list_;
    std::vector<std::pair<ggml_tensor *, Range>> to_repack_;  // then the last in the file first
    static constexpr int64_t kNoRun = -1, kNoAbort = -2;
    std::vector<std::pair<ggml_tensor *, std::string>> hidden_;
    std::atomic<int64_t> current_run_{kNoRun}, abort_run_{kNoAbort};
    std::chrono::steady_clock::time_point paused_at_, pauses_from_;
    struct PausedRun {
        int64_t run;
        Wire wire;
        std::vector<uint8_t> hidden;
        int64_t hidden_width;
        bool skips_logits, pauses;
        const void * passing;
        Threads threads;
        int misplaced, missing;
    };
    std::optional<PausedRun> paused_;
};

using Compute = std::function<ggml_status(ggml_cgraph *)>;
// Computes a graph of a stage's run that pauses, in parts.
ggml_status compute_with_pauses(Stage & stage, const ggml_cgraph * graph, const Compute & compute);

// Gives a llama_context another's memory, `shared`, instead of its `own`, or the other way round. False: its pointer was not found.
bool replace_memory(void * context, const void * own, void * shared);

ggml_backend_dev_t cpu_device();
void * cpu_function(const char * name);  // from the CPU backend's registry; throws if it is not there
bool runs_on(const Device & device, const ggml_tensor * op);
inline bool cpu_runs(const ggml_tensor * op) { return ggml_backend_dev_supports_op(cpu_device(), op); }
inline Device & device_of(ggml_backend_dev_t d) { return *(Device *) d->context; }
inline Device & device_of(ggml_backend_buffer_type_t t) { return device_of(t->device); }

// The types of buffers in which the CPU backend repacks weights, nullptr-terminated; nullptr: it shall not. And the first of
// these in which it takes `weight` for `op`, nullptr if there is none.
ggml_backend_buffer_type_t * repacking_types(const Stage & stage);
ggml_backend_buffer_type_t repacking_type(const Stage & stage, ggml_tensor * weight, const ggml_tensor * op);
bool runs_in(ggml_backend_buffer_type_t type, ggml_tensor * weight, const ggml_tensor * op);

// Parts of mapped files: reads one into memory, and returns an error number or 0; gives back the memory of one's whole pages.
int read_pages(uintptr_t address, size_t size);
void give_back_pages(const Range & range);

// Buffers: address space that costs nothing until it is touched; PROT_NONE where nothing ever is.
extern const ggml_backend_buffer_i kMemory, kRemote;  // those that hold bytes, and those of other ranks
ggml_backend_buffer_t reserve(ggml_backend_buffer_type_t type, const ggml_backend_buffer_i & calls, size_t size, int prot);

// Asks Linux for huge pages where whole ones fit into memory that will be used: their addresses are found faster.
void use_huge_pages(void * data, size_t size);

}  // namespace ggpipe
