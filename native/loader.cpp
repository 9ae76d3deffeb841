// The load phase: which tensors libllama's loader reads, which it never sees, and where ours live.
//
// libllama loads by path with load_mode NONE and looks every tensor up by name before it reads it. A tensor
// whose name is changed in `init_tensor` is not found, so not read; its name comes back after loading.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "gguf.h"
#include "stage.h"

namespace ggpipe {

MappedModel::MappedModel(const std::vector<std::string> & paths) {
    for (const auto & path : paths) {
        gguf_context * gguf = gguf_init_from_file(path.c_str(), {/*no_alloc*/ true, /*ctx*/ nullptr});
        if (!gguf) throw std::runtime_error("cannot read the GGUF header of " + path);
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat st = {};
        void * base = MAP_FAILED;
        if (fd >= 0 && fstat(fd, &st) == 0) base = mmap(nullptr, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        const int error = errno;
        if (fd >= 0) close(fd);
        if (base == MAP_FAILED) {
            gguf_free(gguf);
            throw std::runtime_error("cannot map " + path + ": " + strerror(error));
        }
        maps_.emplace_back(base, st.st_size);
        const size_t data = gguf_get_data_offset(gguf);
        for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
            const size_t at = data + gguf_get_tensor_offset(gguf, i);
            tensors_[gguf_get_tensor_name(gguf, i)] = {(uint8_t *) base + at, gguf_get_tensor_size(gguf, i)};
        }
        gguf_free(gguf);
    }
}

MappedModel::~MappedModel() {
    for (auto & [base, size] : maps_) munmap(base, size);
}

const MappedModel::Place * MappedModel::find(const char * tensor) const {
    const auto it = tensors_.find(tensor);
    return it == tensors_.end() ? nullptr : &it->second;
}

void give_back_pages(const void * from, const void * end) {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t first = (uintptr_t(from) + kPage - 1) & ~(kPage - 1), last = uintptr_t(end) & ~(kPage - 1);
    if (first < last) madvise((void *) first, last - first, MADV_DONTNEED);
}

void MappedModel::drop_others(std::vector<std::pair<void *, size_t>> kept) const {
    std::sort(kept.begin(), kept.end());
    for (auto & [base, size] : maps_) {
        const char * at = (const char *) base, * end = at + size;
        for (auto & [data, n] : kept) {
            if (data < base || data >= end) continue;
            give_back_pages(at, data);
            at = (const char *) data + n;
        }
        give_back_pages(at, end);
    }
}

void Stage::begin_load(std::shared_ptr<MappedModel> mapping) {
    mapping_ = std::move(mapping);
    hidden_.clear();
    loading_ = true;
}

void Stage::end_load() {
    loading_ = false;
    for (auto & [tensor, name] : hidden_) ggml_set_name(tensor, name.c_str());
    hidden_.clear();
}

ggml_status Stage::place_weight(ggml_tensor * tensor, Role role, bool host) {
    if (!loading_ || tensor->view_src) return GGML_STATUS_SUCCESS;
    const bool ours = host ? first : role == Role::Local;
    if (ours) {
        const auto * place = mapping_ ? mapping_->find(tensor->name) : nullptr;
        if (!place) return GGML_STATUS_SUCCESS;  // the loader reads it into memory of its own
        tensor->data = place->data;
        if (!host) mapped_ranges_.emplace_back(place->data, place->size);  // embedding rows are read one by one
    }
    hide(tensor);
    return GGML_STATUS_SUCCESS;
}

void Stage::hide(ggml_tensor * tensor) {
    hidden_bytes_ += ggml_nbytes(tensor);
    hidden_.emplace_back(tensor, tensor->name);
    ggml_set_name(tensor, "-");
}

void Stage::remove_buffer(const void * base) {
    for (size_t i = 0; i < buffers_.size(); i++) {
        if (buffers_[i].first == base) {
            buffers_.erase(buffers_.begin() + i);
            return;
        }
    }
}

bool Stage::is_result(const void * data) const {
    if (data == passing) return true;
    for (auto & [base, size] : buffers_) {
        if (data >= base && data < base + size) return true;
    }
    return false;
}

}  // namespace ggpipe
