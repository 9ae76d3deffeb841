// A stage while it loads, and from run to run.
//
// libllama loads by path with load_mode NONE and looks every tensor up by name before it reads it. A tensor
// whose name is changed in `init_tensor` is not found, so not read; its name comes back after loading.
#include "stage.h"

#include <cstring>

#include <algorithm>

#include "group.h"

namespace ggpipe {

Stage::Stage(bool first, bool repack, bool exact, bool fast_kernels, bool touch_cells)
    : first(first), repack(repack), exact(exact), fast_kernels(fast_kernels), touch_cells(touch_cells), up(this, Role::Up), local(this, Role::Local), down(this, Role::Down) {}

void Stage::begin_load(Places file_, bool use_in_place_) {
    file = std::move(file_);
    use_in_place = use_in_place_;
    loading = true;
}

void Stage::end_load(bool loaded) {
    loading = false;
    if (loaded) {
        begin_repacking();
        for (auto & [tensor, name] : hidden_) ggml_set_name(tensor, name.c_str());
    }
    hidden_.clear();
}

ggml_status Stage::place_weight(ggml_tensor * tensor, Role role, bool host) {
    if (tensor->view_src) return GGML_STATUS_SUCCESS;
    if (!loading) {
        if (role == Role::Local) states.add(tensor);
        return GGML_STATUS_SUCCESS;
    }
    if (host ? first : role == Role::Local) weights.push_back(tensor->name);
    if (!host && role == Role::Local && streamed && streamed->add(tensor)) {
        hide(tensor);
        return GGML_STATUS_SUCCESS;
    }
    if (host ? first : role == Role::Local) {
        if (streamed) streamed->stays(ggml_nbytes(tensor));
        const auto place = file.find(tensor->name);
        if (!use_in_place || place == file.end()) return GGML_STATUS_SUCCESS;  // the loader reads it into memory of its own
        tensor->data = (void *) place->second.first;
        if (!host) add_mapped_range(tensor->data, place->second.second);  // embedding rows are read one by one
    }
    hide(tensor);
    return GGML_STATUS_SUCCESS;
}

void Stage::hide(ggml_tensor * tensor) {
    hidden_bytes += ggml_nbytes(tensor);
    hidden_.emplace_back(tensor, tensor->name);
    ggml_set_name(tensor, "-");
}

void Stage::add_mapped_range(const void * data, size_t size) {
    mapped_ranges.emplace_back(uintptr_t(data), size);
    mapped_bytes += size;
}

bool Stage::is_result(const void * data) const {
    const auto behind = buffers.upper_bound(data);
    if (behind == buffers.begin()) return data == passing;
    const auto & [base, size] = *std::prev(behind);
    return data == passing || data < (const char *) base + size;
}

void Stage::begin_run(int64_t run, const uint8_t * incoming, size_t size, size_t headroom) {
    wire.begin(incoming, size, headroom);
    passing = nullptr;
    misplaced = missing = 0;
    threads.n_operations = threads.n_waits = 0;
    hidden.clear();
    if (group) group->begin_run();
    current_run_ = run;
}

void Stage::end_run() {
    current_run_ = kNoRun;
    passing = nullptr;
}

void Stage::cancel(int64_t run) {
    if (current_run_ != run) return;
    abort_run_ = run;
    if (streamed) streamed->wake();
}

void CompressorStates::add(ggml_tensor * tensor) {
    if (tensor->op != GGML_OP_NONE || strncmp(tensor->name, "dsv4_", 5) || !strstr(tensor->name, "_state_")) return;
    for (const ggml_tensor * other : tensors_) {
        if (!strcmp(other->name, tensor->name)) return;
    }
    tensors_.push_back(tensor);
}

void CompressorStates::copy(int from, int to) const {
    for (const ggml_tensor * t : tensors_) memcpy((char *) t->data + to * t->nb[2], (const char *) t->data + from * t->nb[2], t->nb[2]);
}

}  // namespace ggpipe
