// Weights that the CPU backend repacks.
//
// libllama's loader would read and repack them one after another, on one thread. Those in files that are mapped are hidden from it
// instead, and repacked afterwards, several at a time. libllama is given buffer types that differ from ggml's only in how a buffer
// is made: it is one of ggml's, and notes which weights come into it.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "stage.h"

namespace ggpipe {

namespace {
constexpr size_t kBatch = 256 << 20;  // bytes for each thread until progress is told
constexpr size_t kMostThreads = 16;
constexpr uintptr_t kPage = 4096;
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14

std::mutex mutex;
std::map<ggml_backend_buffer_t, Repacker *> filling;  // by stages that load

Repacker & repacker_of(ggml_backend_buffer_t buffer) {
    const std::lock_guard<std::mutex> lock(mutex);
    return *filling.at(buffer);
}

ggml_status init_weight(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    Repacker & repacker = repacker_of(buffer);
    const ggml_status status = repacker.init_tensor ? repacker.init_tensor(buffer, tensor) : GGML_STATUS_SUCCESS;
    repacker.stage->place_repacked(tensor);
    return status;
}

void release(ggml_backend_buffer_t buffer) {  // where libllama could not load the model
    const Repacker & repacker = repacker_of(buffer);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        filling.erase(buffer);
    }
    if (repacker.free_buffer) repacker.free_buffer(buffer);
}

ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t type, size_t size) {
    Repacker & repacker = *(Repacker *) type;
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(repacker.real, size);
    if (!buffer || !repacker.stage->loading) return buffer;
    use_huge_pages(ggml_backend_buffer_get_base(buffer), size);
    const std::lock_guard<std::mutex> lock(mutex);
    filling[buffer] = &repacker;
    repacker.init_tensor = std::exchange(buffer->iface.init_tensor, init_weight);
    repacker.free_buffer = std::exchange(buffer->iface.free_buffer, release);
    return buffer;
}

size_t n_cpus() {
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
}
}  // namespace

ggml_backend_buffer_type_t * repacking_types(const Stage & stage) {
    static const auto all = (ggml_backend_dev_get_extra_bufts_t) cpu_function("ggml_backend_dev_get_extra_bufts");
    return stage.repack ? all(cpu_device()) : nullptr;
}

ggml_backend_buffer_type_t repacking_type(const Stage & stage, ggml_tensor * weight, const ggml_tensor * op) {
    ggml_backend_buffer_type_t found = nullptr;
    for (auto * type = repacking_types(stage); type && *type && !found; type++) {
        if (runs_in(*type, weight, op)) found = *type;
    }
    return found;
}

bool runs_in(ggml_backend_buffer_type_t type, ggml_tensor * weight, const ggml_tensor * op) {
    ggml_backend_buffer_t const ours = weight->buffer;
    weight->buffer = ggml_backend_buft_alloc_buffer(type, 0);
    const bool runs = cpu_runs(op);
    ggml_backend_buffer_free(weight->buffer);
    weight->buffer = ours;
    return runs;
}

ggml_backend_buffer_type_t * Stage::repackers() {
    if (repacker_list_.empty()) {
        for (auto * type = repacking_types(*this); type && *type; type++) {
            Repacker & repacker = repackers_.emplace_back(Repacker{**type, *type, this});
            repacker.type.iface.alloc_buffer = alloc;
        }
        for (Repacker & repacker : repackers_) repacker_list_.push_back(&repacker.type);
        repacker_list_.push_back(nullptr);
    }
    return repacker_list_.data();
}

const Repacker * Stage::repacker_of(const ggml_tensor * weight) const {
    if (!weight || !weight->buffer) return nullptr;
    const auto is_its = [weight](const Repacker & r) { return weight->buffer->buft == &r.type; };
    const auto found = std::find_if(repackers_.begin(), repackers_.end(), is_its);
    return found == repackers_.end() ? nullptr : &*found;
}

void Stage::place_repacked(ggml_tensor * tensor) {
    if (!loading || tensor->view_src) return;
    weights.push_back(tensor->name);
    const auto place = file.find(tensor->name);
    if (!use_in_place || place == file.end()) return;  // the loader reads it
    to_repack_.emplace_back(tensor, place->second);
    bytes_to_repack += place->second.second;
    hide(tensor);
}

void Stage::begin_repacking() {
    const auto is_later = [](const auto & a, const auto & b) { return a.second.first > b.second.first; };
    std::sort(to_repack_.begin(), to_repack_.end(), is_later);
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto i = filling.begin(); i != filling.end();) {
        if (i->second->stage != this) {
            i++;
            continue;
        }
        i->first->iface.init_tensor = i->second->init_tensor;
        i->first->iface.free_buffer = i->second->free_buffer;
        i = filling.erase(i);
    }
}

std::optional<size_t> Stage::repack_next() {
    if (to_repack_.empty()) return std::nullopt;
    size_t n_threads = std::min(n_cpus(), kMostThreads), n_bytes = 0;
    std::vector<std::pair<ggml_tensor *, Range>> batch;
    while (!to_repack_.empty() && (batch.size() < n_threads || n_bytes < n_threads * kBatch)) {
        batch.push_back(to_repack_.back());
        to_repack_.pop_back();
        n_bytes += batch.back().second.second;
    }
    size_t next = 0;
    std::mutex reading;  // one after another, in their order: a hard disk would have to seek
    std::atomic<int> error{0};
    const auto repack = [&] {
        while (!error) {
            std::unique_lock<std::mutex> lock(reading);
            if (next == batch.size()) return;
            const auto & [tensor, place] = batch[next++];
            if (const int problem = read_pages(place.first, place.second)) error = problem;
            lock.unlock();
            if (error) return;
            ggml_backend_tensor_set(tensor, (const void *) place.first, 0, place.second);
            give_back_pages(place);
        }
    };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < std::min(n_threads, batch.size()); i++) threads.emplace_back(repack);
    repack();
    for (std::thread & thread : threads) thread.join();
    if (error) throw std::runtime_error(std::string("cannot read weights: ") + strerror(error) + "; copy the model's file again");
    return n_bytes;
}

int read_pages(uintptr_t address, size_t size) {
    const uintptr_t first = address & ~(kPage - 1), end = address + size;
    if (!madvise((void *) first, end - first, kPopulateRead)) return 0;
    if (errno != EINVAL) return errno;
    for (uintptr_t page = first; page < end; page += kPage) (void) *(const volatile char *) page;  // an older Linux
    return 0;
}

void give_back_pages(const Range & range) {
    const uintptr_t first = (range.first + kPage - 1) & ~(kPage - 1), last = (range.first + range.second) & ~(kPage - 1);
    if (first < last) madvise((void *) first, last - first, MADV_DONTNEED);
}

}  // namespace ggpipe
