// The devices UP, LOCAL and DOWN as ggml sees them: tables of functions over a `Device`.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "group.h"
#include "stage.h"

namespace ggpipe {

ggml_backend_dev_t cpu_device() {
    static ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu) throw std::runtime_error("ggml has no CPU backend loaded");
    return cpu;
}

void * cpu_function(const char * name) {
    void * f = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), name);
    if (!f) throw std::runtime_error(std::string("ggml's CPU backend lacks ") + name);
    return f;
}

static size_t page_up(size_t size) { return size ? (size + 4095) & ~size_t(4095) : 4096; }
ggml_backend_buffer_t reserve(ggml_backend_buffer_type_t t, const ggml_backend_buffer_i & calls, size_t size, int prot) {
    void * p = mmap(nullptr, page_up(size), prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : ggml_backend_buffer_init(t, calls, p, size);
}
void use_huge_pages(void * data, size_t size) {
    constexpr uintptr_t kHugePage = 2 << 20;
    const uintptr_t first = (uintptr_t(data) + kHugePage - 1) & ~(kHugePage - 1), end = (uintptr_t(data) + size) & ~(kHugePage - 1);
    if (first < end) madvise((void *) first, end - first, MADV_HUGEPAGE);
}

namespace {

const char * name_of(Role role) {
    constexpr const char * kNames[] = {"UP", "LOCAL", "DOWN", "PART"};
    return kNames[int(role)];
}

void release(ggml_backend_buffer_t b) {
    device_of(b->buft).stage->buffers.erase(b->context);
    munmap(b->context, page_up(b->size));
}
void * base(ggml_backend_buffer_t b) { return b->context; }
size_t alignment(ggml_backend_buffer_type_t) { return 64; }
bool yes(ggml_backend_buffer_type_t) { return true; }
bool no(ggml_backend_buffer_type_t) { return false; }

// ---- buffers that hold bytes: LOCAL's, and HOST's outside loading -------------------------------------------
bool is_host_type(ggml_backend_buffer_type_t t) { return t == &device_of(t).host; }
ggml_status init_weight(ggml_backend_buffer_t b, ggml_tensor * t) {
    Device & d = device_of(b->buft);
    return d.stage->place_weight(t, d.role, is_host_type(b->buft));
}
void write(ggml_backend_buffer_t b, ggml_tensor * t, const void * p, size_t at, size_t n) {
    memcpy((char *) t->data + at, p, n);
    device_of(b->buft).stage->cell_order.restored(t, at, n);
}
void read(ggml_backend_buffer_t, const ggml_tensor * t, void * p, size_t at, size_t n) { memcpy(p, (const char *) t->data + at, n); }
// Zero by giving pages back: an unused KV cell costs no memory. Locked pages (--mlock) are given back by another advice,
// which Linux has since 5.18.
bool give_back(void * p, size_t size) {
    constexpr int kDontNeedLocked = 24;
    return madvise(p, size, MADV_DONTNEED) == 0 || madvise(p, size, kDontNeedLocked) == 0;
}
// The cells of an ended sequence, where each has its own.
void fill(ggml_backend_buffer_t b, ggml_tensor * t, uint8_t v, size_t at, size_t n) {
    char * begin = (char *) t->data + at, * end = begin + n;
    char * first = (char *) page_up(size_t(begin)), * last = (char *) (size_t(end) & ~size_t(4095));  // whole pages between them
    if (v || device_of(b->buft).stage->touch_cells || first >= last || !give_back(first, last - first)) first = last = end;
    memset(begin, v, first - begin);
    memset(last, v, end - last);
}
void clear(ggml_backend_buffer_t b, uint8_t v) {
    const bool touches = v || device_of(b->buft).stage->touch_cells;
    if (touches || !give_back(b->context, page_up(b->size))) memset(b->context, v, b->size);
}

// ---- buffers of other ranks: addresses only; copies to and from them are the wire ---------------------------
void drop(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void send(ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t, size_t size) {
    Device & d = device_of(b->buft);
    // Graph inputs (masks, positions, …) are copied to DOWN too; the next rank makes its own.
    if (d.role == Role::Down && d.stage->running() && d.stage->is_result(data)) d.stage->wire.put(t->name, data, size);
}
void receive(ggml_backend_buffer_t b, const ggml_tensor * t, void * data, size_t, size_t size) {
    Device & d = device_of(b->buft);
    Stage & s = *d.stage;
    s.passing = data;
    const size_t row = ggml_nrows(t) == 1 ? size : 0;
    if (s.running() && d.role != Role::Down && s.wire.take(t->name, data, size, row)) return;
    memset(data, 0, size);
    if (s.running()) (d.role == Role::Down ? s.misplaced : s.missing)++;
}
// A copy between another rank's sequences is that rank's. Other copies are read and written.
bool is_theirs(ggml_backend_buffer_t b, const ggml_tensor * from, ggml_tensor *) {
    return (from->view_src ? from->view_src : from)->buffer->buft == b->buft;
}
void no_clear(ggml_backend_buffer_t, uint8_t) {}

// Whether an operation normalizes what this layer gives. Then it is the next layer's first one. libllama says so of most models'
// norms; others would stay with the layer before, and cross the cut beside what they normalize.
bool normalizes(const ggml_tensor * op, int layer) {
    if (op->op != GGML_OP_RMS_NORM) return false;
    const ggml_tensor * from = op->src[0];
    while (from->view_src) from = from->view_src;
    const bool is_output = !strncmp(from->name, "l_out-", 6) || !strncmp(from->name, "l_last-", 7);
    return is_output && atoi(strchr(from->name, '-') + 1) == layer;
}
}  // namespace

// Every rank's devices answer as the CPU does, but for these norms, so that every rank's scheduler cuts the graph at the same place.
bool runs_on(const Device & device, const ggml_tensor * op) { return cpu_runs(op) && !normalizes(op, device.last_layer); }

const ggml_backend_buffer_i kMemory = {release, base, init_weight, fill, write, read, nullptr, nullptr, nullptr, clear, nullptr};
const ggml_backend_buffer_i kRemote = {release, base, init_weight, drop, send, receive, nullptr, nullptr, is_theirs, no_clear, nullptr};
namespace {

// ---- buffer types -------------------------------------------------------------------------------------------
const char * buft_name(ggml_backend_buffer_type_t t) { return is_host_type(t) ? "HOST" : name_of(device_of(t).role); }
ggml_backend_buffer_t alloc_remote(ggml_backend_buffer_type_t t, size_t size) { return reserve(t, kRemote, size, PROT_NONE); }
ggml_backend_buffer_t alloc_local(ggml_backend_buffer_type_t t, size_t size) {
    Stage & s = *device_of(t).stage;
    ggml_backend_buffer_t b = reserve(t, kMemory, size, PROT_READ | PROT_WRITE);
    if (b && !s.loading) s.buffers[b->context] = size;
    if (b && !(s.loading && s.use_in_place)) use_huge_pages(b->context, size);
    return b;
}
ggml_backend_buffer_t alloc_host(ggml_backend_buffer_type_t t, size_t size) {
    return reserve(t, kMemory, size, PROT_READ | PROT_WRITE);
}

// ---- devices ------------------------------------------------------------------------------------------------
const char * dev_name(ggml_backend_dev_t d) { return name_of(device_of(d).role); }
void dev_memory(ggml_backend_dev_t, size_t * free, size_t * total) { ggml_backend_dev_memory(cpu_device(), free, total); }
enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }  // gets layers by split
void dev_props(ggml_backend_dev_t d, ggml_backend_dev_props * p) {
    memset(p, 0, sizeof *p);  // no async, no events, no mapping by libllama
    p->name = p->description = dev_name(d);
    p->type = dev_type(d);
    dev_memory(d, &p->memory_free, &p->memory_total);
}
ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t d) { return &device_of(d).buft; }
ggml_backend_buffer_type_t dev_host(ggml_backend_dev_t d) {  // the meta device offers what all its devices agree on
    Device & device = device_of(d);
    return &(device.role == Role::Part ? device.stage->local : device).host;
}
bool remote_takes(ggml_backend_dev_t d, ggml_backend_buffer_type_t t) {
    const Device & device = device_of(d);
    const bool reads_host = device.role == Role::Up && device.stage->first;  // LOCAL looks up the tokens of MTP layers
    return t == dev_buft(d) || (t == dev_host(d) && !reads_host);
}
bool local_takes(ggml_backend_dev_t, ggml_backend_buffer_type_t t) { return ggml_backend_dev_supports_buft(cpu_device(), t); }

bool remote_runs(ggml_backend_dev_t d, const ggml_tensor * op) { return runs_on(device_of(d), op); }

// While loading, LOCAL leaves a weight that can be repacked to the CPU's extra buffer types, which libllama
// asks next: the choice libllama makes for a model that is all on the CPU.
bool local_runs(ggml_backend_dev_t d, const ggml_tensor * op) {
    const Stage & s = *device_of(d).stage;
    if (s.loading && s.streamed) s.streamed->used_by(op);
    for (int i = 0; s.loading && i < 4; i++) {
        ggml_tensor * w = op->src[i];
        if (const Repacker * repacker = s.repacker_of(w)) return runs_in(repacker->real, w, op);
        if (!w || !w->buffer || w->buffer->buft != dev_buft(d) || (s.exact && repacking_breaks(w->type, s.fast_kernels))) continue;
        if (repacking_type(s, w, op)) return false;
    }
    return runs_on(device_of(d), op);
}

ggml_backend_buffer_type_t * dev_repacking_types(ggml_backend_dev_t d) { return device_of(d).stage->repackers(); }

// ---- backends (streams) -------------------------------------------------------------------------------------
const char * backend_name(ggml_backend_t b) { return dev_name(b->device); }
ggml_guid kRemoteGuid = {'g', 'g', 'p', 'i', 'p', 'e', ' ', 'r', 'e', 'm', 'o', 't', 'e'};
ggml_guid kLocalGuid = {'g', 'g', 'p', 'i', 'p', 'e', ' ', 'l', 'o', 'c', 'a', 'l'};

void remote_free(ggml_backend_t b) { delete b; }
ggml_status remote_compute(ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_SUCCESS; }
ggml_backend_t remote_init(ggml_backend_dev_t d, const char *) {
    ggml_backend_i calls = {};
    calls.get_name = backend_name;
    calls.free = remote_free;
    calls.graph_compute = remote_compute;
    return new ggml_backend{&kRemoteGuid, calls, d, nullptr};
}

ggml_backend_t inner(ggml_backend_t b) { return (ggml_backend_t) b->context; }
void local_set_threads(ggml_backend_t b, int n) {
    device_of(b->device).stage->threads.n = n;
    ((ggml_backend_set_n_threads_t) cpu_function("ggml_backend_set_n_threads"))(inner(b), n);
}
void local_free(ggml_backend_t b) { ggml_backend_free(inner(b)); delete b; }
// Where the last hidden state is in a graph: the last result of its width that is not the logits. -1: in another graph.
int find_hidden(const ggml_cgraph * graph, int64_t width) {
    for (int i = width > 0 ? graph->n_nodes - 1 : -1; i >= 0; i--) {
        const ggml_tensor * t = graph->nodes[i];
        const bool fits = (t->flags & GGML_TENSOR_FLAG_OUTPUT) && t->ne[0] == width && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t);
        if (fits && strcmp(t->name, "result_output")) return i;
    }
    return -1;
}
ggml_status local_compute(ggml_backend_t b, ggml_cgraph * whole) {
    Stage & s = *device_of(b->device).stage;
    ggml_cgraph part = *whole, * graph = whole;
    const int hidden_at = find_hidden(whole, s.hidden_width);
    if (s.group) {  // libllama does not ask the meta device for what is below it
        if (s.group->stopped) return GGML_STATUS_ABORTED;
        local_set_threads(b, s.threads.n);
        s.group->graphs->computes(b, graph);
        if (s.group->graphs->is_recording()) return GGML_STATUS_SUCCESS;
        if (graph->uid < kRepeatedUids) part.uid = 0;  // the meta device's graph, whose nodes may get the flag to be computed later
        graph = &part;
    }
    if (hidden_at >= 0 && s.skips_logits) {
        part.n_nodes = hidden_at + 1;
        part.uid = 0;
        graph = &part;
    }
    const auto compute = [&](ggml_cgraph * g) {
        return s.exact ? compute_exact(inner(b), g, s.cell_order, s.fast_kernels, s.threads)
               : s.fast_kernels ? compute_fast(inner(b), g, s.threads) : ggml_backend_graph_compute(inner(b), g);
    };
    const bool streams = s.streamed && !s.streamed->is_whole();
    const auto stops = [&] { return !s.group && s.aborted(); };  // a group's parts agree where they stop
    const ggml_status status = streams ? s.streamed->compute(graph, compute, stops)
                               : s.pauses && !s.group ? compute_with_pauses(s, graph, compute) : compute(graph);  // a group's parts agree in sums
    if (hidden_at >= 0 && status == GGML_STATUS_SUCCESS) {
        const ggml_tensor * t = whole->nodes[hidden_at];
        s.hidden.assign((const uint8_t *) t->data, (const uint8_t *) t->data + ggml_nbytes(t));
    }
    return status;
}
bool abort_check(void * stage) { return ((Stage *) stage)->aborted(); }
ggml_backend_t local_init(ggml_backend_dev_t d, const char *) {
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), nullptr);
    if (!cpu) return nullptr;
    Stage * stage = device_of(d).stage;
    if (!stage->group) {  // its parts agree where they stop
        ((ggml_backend_set_abort_callback_t) cpu_function("ggml_backend_set_abort_callback"))(cpu, abort_check, stage);
    }
    ggml_backend_i calls = {};
    calls.get_name = backend_name;
    calls.free = local_free;
    calls.graph_compute = local_compute;
    return new ggml_backend{&kLocalGuid, calls, d, cpu};
}

// ---- registries ---------------------------------------------------------------------------------------------
const char * reg_name(ggml_backend_reg_t r) { return ((Device *) r->context)->role == Role::Local ? "ggpipe-local" : "ggpipe-remote"; }
size_t reg_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t r, size_t) { return &((Device *) r->context)->dev; }
void * reg_function(ggml_backend_reg_t r, const char * name) {
    if (((Device *) r->context)->role != Role::Local) return nullptr;
    if (!strcmp(name, "ggml_backend_set_n_threads")) return (void *) local_set_threads;
    if (!strcmp(name, "ggml_backend_dev_get_extra_bufts")) return (void *) dev_repacking_types;
    return nullptr;
}

}  // namespace

Device::Device(Stage * s, Role r) : stage(s), role(r) {
    const bool is_local = r == Role::Local;
    reg = {kBackendApiVersion, {reg_name, reg_count, reg_device, reg_function}, this};
    dev = {{dev_name, dev_name, dev_memory, dev_type, dev_props, is_local ? local_init : remote_init, dev_buft, dev_host,
            nullptr, is_local ? local_runs : remote_runs, is_local ? local_takes : remote_takes, nullptr, {}},
           &reg, this};
    buft = {{buft_name, is_local ? alloc_local : alloc_remote, alignment, nullptr, nullptr, is_local ? yes : no}, &dev, nullptr};
    host = {{buft_name, alloc_host, alignment, nullptr, nullptr, yes}, &dev, nullptr};
}

}  // namespace ggpipe
