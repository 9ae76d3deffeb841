// The devices of a group's parts: how our slices get into memory, what is summed, what is read from part to part.
#include "group.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

namespace ggpipe {

namespace {
constexpr Group::Split kMirrored = {GGML_BACKEND_SPLIT_AXIS_MIRRORED, {0}, {1}, 1};

Group & group_of(ggml_backend_dev_t d) { return *device_of(d).stage->group; }
Group & group_of(ggml_backend_buffer_t b) { return group_of(b->buft->device); }

Group::Split split_by(const Group::Cut & cut, const ggml_tensor * t) {
    Group::Split split = {ggml_backend_meta_split_axis(cut.axis), {0}, {0}, 0};
    int64_t length = 0;
    for (const auto & [relative, repeats] : cut.segments) length += relative * repeats;
    length = t->ne[cut.axis] / (length * std::accumulate(cut.pieces.begin(), cut.pieces.end(), int64_t(0)));
    for (const auto & [relative, repeats] : cut.segments) {
        int64_t * ne = split.ne + split.n_segments * cut.pieces.size();
        for (const int64_t n : cut.pieces) *ne++ = n * relative * length;
        split.nr[split.n_segments++] = repeats;
    }
    return split;
}

// Which part has what of a weight or a KV cache.
Group::Split split_of(const ggml_tensor * t, void * group) {
    Group & g = *(Group *) group;
    g.graphs->adopt(t->buffer);
    const auto known = g.splits.find(t);
    if (known != g.splits.end()) return known->second;
    ggml_tensor asked = *t;
    if (!strcmp(t->name, "token_embd.weight")) ggml_set_name(&asked, "output.weight");  // on LOCAL it is the output's
    const bool by_libllama = g.split_attention || strstr(asked.name, ".ffn_") || !strncmp(asked.name, "output.", 7);
    if (g.stage.loading) g.wholes[t->name] = (ggml_tensor *) t;
    const auto cut = g.cuts.find(t->name);
    if (cut != g.cuts.end()) return g.splits[t] = split_by(cut->second, t);
    Group::Split & split = g.splits[t] = by_libllama && g.asked.model ? g.ask(&asked, &g.asked) : kMirrored;
    const int64_t block = ggml_blck_size(t->type);
    if (split.axis == GGML_BACKEND_SPLIT_AXIS_0 && block > 1 && t->ne[0] == block) g.undividable = t->name;
    return split;
}

size_t own_bytes(const ggml_tensor * whole, const Group & g) {
    const Group::Split & split = g.splits.at(whole);
    if (split.axis < 0 || split.axis >= GGML_MAX_DIMS) return ggml_nbytes(whole);
    int64_t n = 0;
    for (uint32_t s = 0; s < split.n_segments; s++) n += split.ne[s * g.asked.n_parts + g.part] * split.nr[s];
    return ggml_nbytes(whole) * n / whole->ne[split.axis];
}

// ---- our slices ---------------------------------------------------------------------------------------------
bool part_runs(ggml_backend_dev_t d, const ggml_tensor * op) {
    Group & g = group_of(d);
    if (g.stage.loading && op->src[0]) g.ops[op->src[0]->name] = op->op;
    if (g.stage.loading && g.stage.streamed) g.stage.streamed->used_by(op);
    return runs_on(device_of(d), op);
}
size_t part_size(ggml_backend_buffer_type_t type, const ggml_tensor * t) {
    Group & g = group_of(type->device);
    const Group::Extra * extra = g.stage.loading ? g.repacker_of((ggml_tensor *) t) : nullptr;
    return std::max(ggml_nbytes(t), extra ? ggml_backend_buft_get_alloc_size(extra->real->buft, t) : 0);
}
ggml_status init_part(ggml_backend_buffer_t b, ggml_tensor * t) {
    Group & g = group_of(b);
    g.graphs->made(g.part, t);
    if (t->view_src || b->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) return GGML_STATUS_SUCCESS;
    if (!g.stage.loading) {
        if (!g.is_paused()) g.own_cells[t->name] = t;  // the second context has the first one's
        g.stage.states.add(t);
        return GGML_STATUS_SUCCESS;
    }
    g.stage.weights.push_back(t->name);
    if (const Group::Extra * extra = g.repacker_of(t)) {
        t->buffer = extra->label;
        extra->real->iface.init_tensor(extra->real, t);
    }
    const auto whole = g.wholes.find(t->name);
    if (whole == g.wholes.end() || !g.stage.file.count(t->name)) return GGML_STATUS_SUCCESS;
    g.left.push_back({whole->second, whole->first, own_bytes(whole->second, g)});
    g.stage.hide(whole->second);
    g.own_bytes += g.left.back().own_bytes;
    return GGML_STATUS_SUCCESS;
}
ggml_status init_hollow(ggml_backend_buffer_t b, ggml_tensor * t) {
    group_of(b).graphs->made(device_of(b->buft->device).part, t);
    return GGML_STATUS_SUCCESS;
}
// The same `n` bytes from each of `times` places. A slice that lies in the file in one piece is used there; so is one of
// experts, of which each lies in one piece.
void write_pieces(ggml_backend_buffer_t b, ggml_tensor * t, const void * p, size_t at, size_t n, size_t times, size_t step, size_t step_there) {
    Group & g = group_of(b);
    const bool experts = times > 1 && n == t->nb[2] && times == size_t(t->ne[2]) && g.ops[t->name] == GGML_OP_MUL_MAT_ID;
    g.in_place = at == 0 && (experts || n == ggml_nbytes(t)) && ((uintptr_t(p) | step_there) & 31) == 0 &&
                 g.source && uintptr_t(p) - g.source->first < g.source->second;
    if (g.in_place && g.stage.streamed && g.stage.streamed->add(t, t->name, {n, uintptr_t(p) - g.source->first, times, step_there})) return;
    if (g.stage.streamed) g.stage.streamed->stays(n * times);
    if (g.in_place) {
        t->data = (void *) p;
        if (experts) t->nb[2] = step_there, t->nb[3] = step_there * times;
    }
    for (size_t i = 0; i < times; i++) {
        char * from = (char *) p + i * step_there;
        if (g.in_place) g.stage.add_mapped_range(from, n);
        else memcpy((char *) t->data + at + i * step, from, n);
    }
}
void write_part(ggml_backend_buffer_t b, ggml_tensor * t, const void * p, size_t at, size_t n) { write_pieces(b, t, p, at, n, 1, 0, 0); }
// A label is a buffer of the CPU's repacking type; the memory is that of our buffer.
void * label_base(ggml_backend_buffer_t b) { return b->context; }
void write_label(ggml_backend_buffer_t b, ggml_tensor * t, const void * p, size_t at, size_t n) {
    Group & g = *(Group *) b->context;
    const size_t size = ggml_nbytes(t);
    const auto extra = std::find_if(g.extras.begin(), g.extras.end(), [b](const Group::Extra & e) { return e.label == b; });
    if (n < size) {
        g.gathered.resize(size);
        memcpy(g.gathered.data() + at, p, n);
        if ((g.n_gathered += n) < size) return;
        p = g.gathered.data();
    }
    extra->real->iface.set_tensor(extra->real, t, p, 0, size);
    std::vector<uint8_t>().swap(g.gathered);
    g.n_gathered = 0;
}
constexpr ggml_backend_buffer_i kLabel = {nullptr, label_base, nullptr, nullptr, write_label, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};

// ---- KV cells: what all parts have alike is read from part 0, and ours is as good ----------------------------
void read_hollow(ggml_backend_buffer_t b, const ggml_tensor * t, void * p, size_t at, size_t n) {
    Group & g = group_of(b);
    memset(p, 0, n);
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    const auto cells = g.own_cells.find(root->name);
    if (device_of(b->buft->device).part > 0 || cells == g.own_cells.end() || ggml_nbytes(cells->second) != ggml_nbytes(root)) return;
    memcpy(p, (const char *) cells->second->data + ((const char *) t->data - (const char *) root->data) + at, n);
}

// ---- buffers of all parts: for each of the meta device's, one from every part, in their order ----------------
ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t type, size_t size) {
    const Group & g = group_of(type->device);
    const bool ours = device_of(type->device).part == g.part;
    ggml_backend_buffer_i calls = ours ? kMemory : kRemote;
    calls.init_tensor = ours ? init_part : init_hollow;
    if (ours) calls.set_tensor = write_part, calls.set_tensor_2d = write_pieces;
    else calls.get_tensor = read_hollow;
    ggml_backend_buffer_t buffer = reserve(type, calls, size, ours ? PROT_READ | PROT_WRITE : PROT_NONE);
    if (buffer && ours) use_huge_pages(buffer->context, size);
    return buffer;
}

// ---- sums: the meta device asks part 0's registry for them ---------------------------------------------------
void * comm_init(ggml_backend_t * backends, size_t) { return &group_of(backends[0]->device); }
void comm_free(void *) {}
bool comm_sum(void * group, ggml_tensor ** slices) {
    Group & g = *(Group *) group;
    g.graphs->sums(slices[g.part]);
    if (!g.graphs->is_recording()) g.add_up(slices[g.part]);
    return true;
}
void * reg_function(ggml_backend_reg_t, const char * name) {
    if (!strcmp(name, "ggml_backend_comm_init")) return (void *) comm_init;
    if (!strcmp(name, "ggml_backend_comm_free")) return (void *) comm_free;
    if (!strcmp(name, "ggml_backend_comm_allreduce_tensor")) return (void *) comm_sum;
    return nullptr;
}
}  // namespace

Group::Group(Stage & stage, int part, int n_parts, std::shared_ptr<GroupSum> sum, Ask ask, const void * model, bool split_attention, Cuts cuts)
    : columns(n_parts), asked{size_t(n_parts), model}, sum(std::move(sum)), stage(stage), part(part), ask(ask),
      split_attention(split_attention), cuts(std::move(cuts)), own_graphs(*this), graphs_in_pauses(*this) {
    check_split();
    std::vector<ggml_backend_dev_t> devices;
    for (int i = 0; i < n_parts; i++) {
        if (i != part) hollow.push_back(std::make_unique<Device>(&stage, Role::Part));
        Device & d = i == part ? stage.local : *hollow.back();
        d.part = i;
        d.reg.iface.get_proc_address = reg_function;
        d.buft.iface.alloc_buffer = alloc;
        if (i == part) {
            d.dev.iface.supports_op = part_runs;
            d.buft.iface.get_alloc_size = part_size;
            d.buft.iface.is_host = [](ggml_backend_buffer_type_t) { return false; };  // nobody may reach past the meta device
        }
        devices.push_back(&d.dev);
    }
    device = ggml_backend_meta_device(devices.data(), n_parts, split_of, this);
    graphs->adopt(device);
    for (auto * type = repacking_types(stage); type && *type; type++) {
        Extra extra = {ggml_backend_buft_alloc_buffer(*type, 64), ggml_backend_buffer_init(*type, kLabel, this, SIZE_MAX)};
        ggml_backend_buffer_set_usage(extra.label, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        extras.push_back(extra);
    }
}

Group::~Group() {
    for (Extra & e : extras) {
        ggml_backend_buffer_free(e.real);
        ggml_backend_buffer_free(e.label);
    }
}

// Asks for two tensors whose answers are known, into memory that shows how much was written.
void Group::check_split() {
    struct Answer { Split split; uint8_t behind[512]; };
    alignas(Answer) unsigned char memory[sizeof(Answer)];
    ggml_tensor t = {};
    t.type = GGML_TYPE_F32;
    t.ne[0] = t.ne[2] = t.ne[3] = 1;
    t.ne[1] = 960;
    bool right = true;
    for (const char * name : {"output_norm.weight", "output.weight"}) {
        ggml_set_name(&t, name);
        memset(memory, 0xa5, sizeof memory);
        asm volatile("" : : "r"(memory) : "memory");
        const Answer & a = *new (memory) Answer(((Answer(*)(const ggml_tensor *, void *)) (void *) ask)(&t, &asked));
        asm volatile("" : : "r"(memory) : "memory");
        right &= std::all_of(a.behind, a.behind + sizeof a.behind, [](uint8_t b) { return b == 0xa5; });
        right &= a.split.n_segments == 1 && a.split.nr[0] == 1;
        int64_t n = 0;
        for (size_t i = 0; i < asked.n_parts; i++) n += a.split.ne[i];
        const bool mirrored = a.split.axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED;
        right &= mirrored ? n == 0 : name[6] == '.' && a.split.axis == GGML_BACKEND_SPLIT_AXIS_1 && n == t.ne[1];
    }
    if (!right) throw std::runtime_error("libllama's function that splits weights is not as ggpipe was built for: reinstall both");
}

void Group::add_up(ggml_tensor * slice) {
    const bool can = slice->type == GGML_TYPE_F32 && ggml_is_contiguous(slice);
    if (!can) unsummable = slice->name;
    if (!(slice->flags & GGML_TENSOR_FLAG_COMPUTE)) memset(slice->data, 0, ggml_nbytes(slice));  // we have nothing of its sources
    if (!can) return void(stopped = true);
    stage.pause_places += graphs->may_pause();
    const bool pauses = part == 0 && stage.pauses && graphs->may_pause() && stage.pause_is_due();  // part 0 decides
    const uint32_t wants = (stage.aborted() ? uint32_t(GroupSum::kStop) : 0) | (pauses ? uint32_t(GroupSum::kPause) : 0);
    const uint32_t wanted = sum->sum((float *) slice->data, ggml_nelements(slice), wants);
    if (wanted & GroupSum::kStop) stopped = true;
    else if (wanted & GroupSum::kPause) stage.at_pause();
}

// Who repacks a slice, if anybody does: libllama's choice for a model that is all on the CPU. Of matrices of heads, nobody:
// with those of a single head, repacked, ggml would read rows of views as if they lay together.
Group::Extra * Group::repacker_of(ggml_tensor * t) {
    const auto op = ops.find(t->name);
    if (op == ops.end() || t->view_src || ggml_nelements(t) == 0) return nullptr;
    const auto whole = wholes.find(t->name);
    if (whole != wholes.end() && ggml_n_dims(whole->second) != ggml_n_dims(t)) return nullptr;
    ggml_context * c = ggml_init({ggml_tensor_overhead() * 8, nullptr, true});
    ggml_tensor * product = nullptr;
    if (op->second == GGML_OP_MUL_MAT) {
        product = ggml_mul_mat(c, t, ggml_new_tensor_4d(c, GGML_TYPE_F32, t->ne[0], 512, t->ne[2], t->ne[3]));
    } else if (op->second == GGML_OP_MUL_MAT_ID) {
        product = ggml_mul_mat_id(c, t, ggml_new_tensor_3d(c, GGML_TYPE_F32, t->ne[0], 1, 512), ggml_new_tensor_2d(c, GGML_TYPE_I32, 1, 512));
    }
    ggml_backend_buffer_type_t const type = product ? repacking_type(stage, t, product) : nullptr;
    ggml_free(c);
    const auto found = std::find_if(extras.begin(), extras.end(), [type](const Extra & e) { return e.real->buft == type; });
    return found == extras.end() ? nullptr : &*found;
}

std::optional<size_t> Group::load_next() {
    if (left.empty()) return std::nullopt;
    const Left next = left.back();
    left.pop_back();
    const Range place = stage.file.at(next.name);
    source = stage.use_in_place ? &place : nullptr;
    in_place = false;
    ggml_backend_tensor_set(next.whole, (const void *) place.first, 0, place.second);
    source = nullptr;
    if (in_place) {
        own_bytes -= next.own_bytes;
        return 0;
    }
    give_back_pages(place);  // what was read of it, for others too
    return next.own_bytes;
}

void Group::pause() {
    graphs = &graphs_in_pauses;
    graphs->put_back();
}

void Group::resume() {
    graphs = &own_graphs;
    graphs->put_back();
    stopped = false;  // it had not been
    std::fill(columns.begin(), columns.end(), 0);
}

void Group::begin_run() {
    stopped = false;
    graphs->begin_run();
    stage.pause_places = 0;
    std::fill(columns.begin(), columns.end(), 0);
}

}  // namespace ggpipe
