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
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "cell_order.h"

namespace ggpipe {

// The files of one model, mapped read-only: where each tensor's bytes are.
class MappedModel {
   public:
    struct Place { void * data; size_t size; };
    explicit MappedModel(const std::vector<std::string> & paths);
    ~MappedModel();
    MappedModel(const MappedModel &) = delete;
    const Place * find(const char * tensor) const;
    void drop_others(std::vector<std::pair<void *, size_t>> kept) const;  // the kernel maps whole folios, also others' parts of them

   private:
    std::vector<std::pair<void *, size_t>> maps_;
    std::map<std::string, Place> tensors_;
};

// Tensors of one run that crossed the boundary, packed one behind the other (see `wire.cpp`).
class Wire {
   public:
    void begin(const uint8_t * incoming, size_t size, size_t headroom);
    void put(const char * copy_name, const void * data, size_t size);  // name as the scheduler gives it to a copy
    bool take(const char * name, void * data, size_t size);            // false: the run did not bring it
    std::vector<uint8_t> out;             // headroom, then what goes to the next rank
    std::vector<std::string> wanted;      // what UP was asked for, in order: the dry run compares it
    std::vector<std::string> produced;    // what DOWN was given, in order

   private:
    struct Frame { const char * name; size_t name_size; const uint8_t * data; size_t size; bool used; };
    std::vector<Frame> in_;
};

class Stage;
struct Group;
enum class Role { Up, Local, Down, Part };  // Part: what another rank of our group has of our layers

struct Device {  // a ggml device, its registry (libllama asks that for functions) and its buffer types
    Device(Stage * stage, Role role);
    Stage * stage;
    Role role;
    int part = 0;  // of a group
    ggml_backend_reg reg;
    ggml_backend_device dev;
    ggml_backend_buffer_type buft;  // weights, KV cells and activations of this side
    ggml_backend_buffer_type host;  // HOST, see above
};

class Stage {
   public:
    // first: no rank before this one. repack: let the CPU backend repack weights. exact: reference kernels.
    // fast_attention: our own kernel, where it can and not `exact`.
    Stage(bool first, bool repack, bool exact, bool fast_attention);

    bool first, repack, exact, fast_attention;
    Device up, local, down;
    std::shared_ptr<Group> group;  // where other ranks compute the same layers: each has a part of every weight

    // Loading: between the two calls, tensors of other ranks are hidden from libllama's loader, and, with a
    // mapping, our own point into the file instead of being read.
    void begin_load(std::shared_ptr<MappedModel> mapping);
    void end_load();
    bool loading() const { return loading_; }
    ggml_status place_weight(ggml_tensor * tensor, Role role, bool host);
    void hide(ggml_tensor * tensor);
    bool maps() const { return mapping_ != nullptr; }
    void add_mapped_range(void * data, size_t size) { mapped_ranges_.emplace_back(data, size); }
    const std::vector<std::pair<void *, size_t>> & mapped_ranges() const { return mapped_ranges_; }
    size_t hidden_bytes() const { return hidden_bytes_; }

    // One run. `cancel` may come from another thread at any time.
    void begin_run(int64_t run, const uint8_t * incoming, size_t size, size_t headroom);
    void end_run();
    void cancel(int64_t run);
    bool aborted() const { return abort_run_.load() == current_run_.load(); }
    bool running() const { return current_run_.load() != kNoRun; }

    // LOCAL's own (non-weight) memory: only what lies in it is a result worth sending.
    void add_buffer(const void * base, size_t size) { buffers_.emplace_back((const uint8_t *) base, size); }
    void remove_buffer(const void * base);
    bool is_result(const void * data) const;

    CellOrder cell_order;  // kept where `exact`
    int n_threads = 1;     // of LOCAL
    Wire wire;
    const void * passing = nullptr;  // where UP's last tensor went: a copy from there to DOWN passes through
    int misplaced = 0;               // reads from DOWN: the cut runs through a layer
    int missing = 0;                 // reads from UP that the run did not bring

   private:
    static constexpr int64_t kNoRun = -1, kNoAbort = -2;
    bool loading_ = false;
    std::shared_ptr<MappedModel> mapping_;
    std::vector<std::pair<ggml_tensor *, std::string>> hidden_;
    std::vector<std::pair<void *, size_t>> mapped_ranges_;
    size_t hidden_bytes_ = 0;
    std::vector<std::pair<const uint8_t *, size_t>> buffers_;
    std::atomic<int64_t> current_run_{kNoRun}, abort_run_{kNoAbort};
};

void give_back_pages(const void * from, const void * end);  // whole ones between the two, of a file

ggml_backend_dev_t cpu_device();
void * cpu_function(const char * name);  // from the CPU backend's registry; throws if it is not there
inline Device & device_of(ggml_backend_dev_t d) { return *(Device *) d->context; }
inline Device & device_of(ggml_backend_buffer_type_t t) { return device_of(t->device); }
ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t local);  // nullptr-terminated; repacking lives in these

// Buffers: address space that costs nothing until it is touched; PROT_NONE where nothing ever is.
extern const ggml_backend_buffer_i kMemory, kRemote;  // those that hold bytes, and those of other ranks
ggml_backend_buffer_t reserve(ggml_backend_buffer_type_t type, const ggml_backend_buffer_i & calls, size_t size, int prot);

}  // namespace ggpipe
