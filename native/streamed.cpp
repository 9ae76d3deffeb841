#include "streamed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace ggpipe {

namespace {
#ifndef MREMAP_DONTUNMAP  // as in older C libraries
#define MREMAP_DONTUNMAP 4
#endif
constexpr size_t kHugePage = 2 << 20, kChunk = kHugePage, kWideWindow = 64 << 20;
const size_t kPage = sysconf(_SC_PAGESIZE);

uintptr_t page_down(uintptr_t n) { return n & ~(kPage - 1); }
uintptr_t page_up(uintptr_t n) { return page_down(n + kPage - 1); }

uintptr_t huge_page_up(uintptr_t n) { return (n + kHugePage - 1) & ~(kHugePage - 1); }

// An address range, aligned to huge pages, that takes up no memory until it is touched.
char * reserve_pages(size_t size, std::vector<std::pair<void *, size_t>> & reserved) {
    const size_t all = size + kHugePage;
    void * p = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error(std::string("no addresses for weights: ") + strerror(errno));
    reserved.emplace_back(p, all);
    return (char *) huge_page_up(uintptr_t(p));
}

constexpr int kNoLayer = INT32_MAX;  // sorted after all layers
int layer_of(const char * name) { return strncmp(name, "blk.", 4) == 0 ? atoi(name + 4) : kNoLayer; }
}  // namespace

StreamedWeights::StreamedWeights(const std::vector<std::string> & paths, std::map<std::string, Place> places, size_t memory, int n_readers)
    : paths_(paths), places_(std::move(places)), memory_(memory) {
    for (const std::string & path : paths) {
        const int buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        files_.emplace_back(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT), buffered);
        if (buffered < 0) throw std::runtime_error("cannot open " + path + ": " + strerror(errno));
    }
    for (int i = 0; i < n_readers; i++) {
        char * buffer = reserve_pages(kChunk, reserved_);
        madvise(buffer, kChunk, MADV_HUGEPAGE);
        readers_.emplace_back([this, buffer] { read_all(buffer); });
    }
}

StreamedWeights::~StreamedWeights() {
    {
        const Lock lock(mutex_);
        stopping_ = true;
        work_.notify_all();
    }
    for (std::thread & reader : readers_) reader.join();
    for (const auto & [direct, buffered] : files_) {
        if (direct >= 0) close(direct);
        close(buffered);
    }
    for (const auto & [address, size] : reserved_) munmap(address, size);
}

// ---- loading ------------------------------------------------------------------------------------------------
void StreamedWeights::used_by(const ggml_tensor * op) {
    if (op->src[0] && (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID)) ops_[op->src[0]->name] = op->op;
}

bool StreamedWeights::add(ggml_tensor * tensor) {
    const auto found = places_.find(tensor->name);
    return found != places_.end() && add(tensor, tensor->name, {found->second.size, 0, 1, 0});
}

bool StreamedWeights::add(ggml_tensor * tensor, const std::string & name, const Pieces & pieces) {
    const auto op = ops_.find(name);
    if (op == ops_.end()) return false;
    const Place & place = places_.at(name);
    Tensor & t = tensors_[tensor];
    t.is_experts = op->second == GGML_OP_MUL_MAT_ID;
    const size_t n = t.is_experts ? tensor->ne[2] : 1, all = pieces.size * pieces.times, size = all / n;
    const size_t skew = (place.offset + pieces.from) % kPage;  // aligns pages of the file with pages of memory
    const bool in_huge_pages = !t.is_experts && size >= kHugePage;
    char * base = reserve_pages(page_up(skew + all), reserved_);
    madvise(base, page_up(skew + all), in_huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    tensor->data = base + skew;
    for (size_t i = 0; i < n; i++) {
        Unit & unit = units_.emplace_back();
        unit.file = place.file;
        unit.offset = place.offset + pieces.from + (pieces.times > 1 ? i * pieces.step : i * size);
        unit.data = (char *) tensor->data + i * size;
        unit.n_bytes = size;
        unit.skew = unit.offset % kPage;
        unit.size = page_up(unit.skew + size);
        unit.in_layer = layer_of(name.c_str()) != kNoLayer;
        unit.in_huge_pages = in_huge_pages;
        unit.is_expert = t.is_experts;
        unit.number = units_.size();
        const uintptr_t first = uintptr_t(unit.data), end = first + size;
        unit.begin = (char *) (i == 0 ? page_down(first) : page_up(first));
        unit.end = (char *) (i == n - 1 ? page_up(end) : page_down(end));
        t.units.push_back(&unit);
    }
    return true;
}

size_t StreamedWeights::begin() {
    std::vector<std::pair<int, const Tensor *>> matrices, experts;  // by layer
    for (const auto & [tensor, t] : tensors_) (t.is_experts ? experts : matrices).emplace_back(layer_of(tensor->name), &t);
    // Units are in the order in which libllama made the tensors, which is about that of their use.
    const auto by_use = [](const auto & a, const auto & b) {
        return a.first != b.first ? a.first < b.first : a.second->units[0]->number < b.second->units[0]->number;
    };
    std::sort(matrices.begin(), matrices.end(), by_use);
    std::sort(experts.begin(), experts.end(), by_use);
    Units ordered;
    for (const auto & [layer, t] : matrices) ordered.push_back(t->units[0]);
    size_t n_expert_bytes = 0, largest = 0;
    for (const auto & [layer, t] : experts) {
        size_t bytes = 0;
        for (const Unit * unit : t->units) bytes += unit->size;
        n_expert_bytes += bytes;
        largest = std::max(largest, bytes);
    }
    cache_ = largest;  // a run of many rows may need all of a tensor
    const size_t whole = memory_;
    memory_ = whole > stays_ ? whole - stays_ : 0;
    const size_t needed = choose_kept(ordered, n_expert_bytes);
    if (needed > memory_) {
        memory_ = whole;
        return needed + stays_;
    }
    for (const auto & [address, size] : reserved_) {
        if (is_whole_) madvise(address, size, MADV_HUGEPAGE);  // experts too, since none of them is evicted
    }
    const Lock lock(mutex_);
    for (Unit * unit : ordered) {
        if (unit->is_kept) request(unit, to_load_);
        else ring_.push_back(unit), bytes_streamed_ += unit->size;
    }
    for (size_t i = 0; i < ring_.size(); i++) at_[ring_[i]] = i;
    for (size_t i = 0, left = experts.size(); left; i++) {
        left = 0;
        for (const auto & [layer, t] : experts) {
            if (i >= t->units.size()) continue;
            left++;
            Unit * unit = t->units[i];
            if (in_cache_ + unit->size > cache_) continue;
            in_cache_ += unit->size;
            request(unit, to_load_);
        }
    }
    for (const Unit * unit : to_load_) bytes_to_load_ += unit->size;
    n_to_load_ = to_load_.size();
    return needed;
}

// Choose the matrices that stay in memory, and the sizes of the window and of the experts' cache. `matrices`: in the order of their
// use. Returns the minimum memory in bytes.
size_t StreamedWeights::choose_kept(const Units & matrices, size_t n_expert_bytes) {
    std::vector<size_t> sizes;  // of those that may be streamed: not the output layer's, which draft heads in this process read as well
    size_t all = 0;
    for (const Unit * unit : matrices) {
        all += unit->size;
        if (unit->in_layer) sizes.push_back(unit->size);
    }
    if (all + cache_ <= memory_) {
        cache_ = std::min(memory_ - all, n_expert_bytes);
        is_whole_ = cache_ == n_expert_bytes;
        for (Unit * unit : matrices) unit->is_kept = true;
        return 0;
    }
    // Those up to a size are candidates: the window has room for three of them, one that is in use and two that are read.
    std::sort(sizes.begin(), sizes.end());
    size_t candidates = 0, least = cache_ + all, to_stream = 0, limit = 0;
    for (size_t i = 0; i < sizes.size() && !limit; i++) {
        candidates += sizes[i];
        if (i + 1 < sizes.size() && sizes[i + 1] == sizes[i]) continue;
        const size_t needed = cache_ + all - candidates + 3 * sizes[i];
        least = std::min(least, needed);
        if (needed > memory_) continue;
        limit = sizes[i];
        const size_t room = memory_ - cache_, wide = std::min(kWideWindow, room / 8);
        window_ = wide > 3 * limit && needed - 3 * limit + wide <= memory_ ? wide : 3 * limit;
        to_stream = all - (room - window_);
    }
    if (!limit) return least;
    size_t passed = 0, streamed = 0;
    for (Unit * unit : matrices) {
        unit->is_kept = true;
        if (!unit->in_layer || unit->size > limit) continue;
        passed += unit->size;
        if (streamed + unit->size / 2 <= double(passed) * to_stream / candidates) {
            unit->is_kept = false;
            streamed += unit->size;
        }
    }
    for (Unit * unit : matrices) {
        if (streamed >= to_stream) break;
        if (!unit->is_kept || !unit->in_layer || unit->size > limit) continue;
        unit->is_kept = false;
        streamed += unit->size;
    }
    return least;
}

std::optional<size_t> StreamedWeights::load_next() {
    Lock lock(mutex_);
    done_.wait(lock, [this] { return error_ || n_loaded_ > n_told_ || n_told_ == n_to_load_; });
    if (error_) throw std::runtime_error(problem_());
    if (n_told_ == n_to_load_) return std::nullopt;
    const size_t bytes = bytes_loaded_;
    n_told_ = n_loaded_;
    bytes_loaded_ = 0;
    return bytes;
}

// ---- reading ------------------------------------------------------------------------------------------------
void StreamedWeights::request(Unit * unit, std::deque<Unit *> & list) {
    unit->state = State::Reading;
    unit->n_chunks_left = (unit->size + kChunk - 1) / kChunk;
    unit->next_chunk = 0;
    list.push_back(unit);
    work_.notify_all();
}

// Returns the error's number, or 0. `buffer`: in huge pages, for units in small ones: many disks are slow if a
// request is scattered over small pages.
int StreamedWeights::read(const Unit & unit, size_t from, size_t size, char * buffer) const {
    const auto [direct, buffered] = files_[unit.file];
    const uint64_t offset = unit.offset - unit.skew + from;
    char * const to = unit.in_huge_pages && size == kHugePage ? unit.data - unit.skew + from : buffer;
    const size_t wanted = std::min(size, unit.skew + unit.n_bytes - from);  // the file may end within the last page
    bool past_cache = direct >= 0;
    for (size_t at = 0; at < wanted;) {
        const ssize_t n = pread(past_cache ? direct : buffered, to + at, size - at, offset + at);
        if (n > 0) at += n;
        else if (n == 0) return ENODATA;
        else if (errno == EINVAL && past_cache) past_cache = false;
        else if (errno != EINTR) return errno;
    }
    if (!past_cache) posix_fadvise(buffered, offset, size, POSIX_FADV_DONTNEED);
    if (to == buffer) {
        const size_t skipped = from < unit.skew ? unit.skew - from : 0;
        memcpy(unit.data + from + skipped - unit.skew, buffer + skipped, wanted - skipped);
    }
    return 0;
}

void StreamedWeights::read_all(char * buffer) {
    Lock lock(mutex_);
    while (!stopping_) {
        if (!predictions_.empty()) {
            read_predicted(lock);
            continue;
        }
        std::deque<Unit *> * list = !now_.empty() ? &now_ : !to_load_.empty() ? &to_load_ : !ahead_.empty() ? &ahead_ : nullptr;
        if (!list) {
            if (error_ || !look_ahead()) work_.wait(lock);
            continue;
        }
        Unit * unit = list->front();
        const bool loads = list == &to_load_;
        const size_t from = unit->next_chunk++ * kChunk, size = std::min(kChunk, unit->size - from);
        if (from + size == unit->size) list->pop_front();
        lock.unlock();
        const int error = read(*unit, from, size, buffer);
        lock.lock();
        times_.bytes_read += size;
        if (error && !error_) error_ = error, error_file_ = unit->file;
        if (--unit->n_chunks_left == 0) {
            unit->state = State::Present;
            if (unit->is_expert && !unit->n_holds) idle_.insert(unit);
            if (loads) n_loaded_++, bytes_loaded_ += unit->size;
        }
        if (error_ || unit->n_chunks_left == 0) done_.notify_all();
    }
}

// Prefetch the next matrix that is not in memory, if the window has room.
bool StreamedWeights::look_ahead() {
    for (size_t i = 0; i < ring_.size(); i++) {
        const size_t at = (next_ + i) % ring_.size();
        if (ring_[at]->state != State::Absent) continue;
        if (!make_window(at)) return false;
        request(ring_[at], ahead_);
        return true;
    }
    return false;
}

// Make room in the window for a matrix: those that are used later than it are evicted, the farthest ones first.
bool StreamedWeights::make_window(size_t at) {
    const size_t n = ring_.size(), distance = (at + n - next_) % n;
    for (size_t i = n - 1; in_window_ + ring_[at]->size > window_; i--) {
        if (i <= distance) return false;
        Unit * unit = ring_[(next_ + i) % n];
        if (unit->state == State::Present && !unit->n_holds) drop(unit, ring_[at]);
    }
    in_window_ += ring_[at]->size;
    return true;
}

// Make room in the cache for an expert: the least used ones are evicted.
bool StreamedWeights::make_room(Unit * wanted) {
    while (in_cache_ + wanted->size > cache_) {
        if (idle_.empty()) return false;
        Unit * unit = *idle_.begin();
        idle_.erase(idle_.begin());
        drop(unit, wanted);
    }
    in_cache_ += wanted->size;
    return true;
}

// Evict a unit. The one that replaces it gets its pages: the kernel would have to clear new ones.
void StreamedWeights::drop(Unit * unit, Unit * wanted) {
    const size_t n = std::max<ptrdiff_t>(unit->end - unit->begin, 0);
    const size_t room = std::max<ptrdiff_t>(wanted->end - wanted->begin - wanted->n_given, 0);
    const bool suits = !unit->in_huge_pages && !wanted->in_huge_pages;
    size_t moved = suits ? std::min(n, room) : n == room && unit->skew == wanted->skew ? n : 0;  // otherwise, huge pages would be split
    const int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    if (moved && mremap(unit->begin, moved, moved, how, wanted->begin + wanted->n_given) == MAP_FAILED) moved = 0;
    wanted->n_given += moved;
    if (moved < n) madvise(unit->begin + moved, n - moved, MADV_DONTNEED);
    unit->n_given = 0;
    unit->state = State::Absent;
    (unit->is_expert ? in_cache_ : in_window_) -= unit->size;
}

void StreamedWeights::wake() {
    const Lock lock(mutex_);
    done_.notify_all();
}

std::string StreamedWeights::problem_() const {
    return error_ ? "cannot read " + paths_[error_file_] + ": " + (error_ == ENODATA ? "it is shorter than it was" : strerror(error_)) : "";
}

std::string StreamedWeights::problem() const {
    const Lock lock(mutex_);
    return problem_();
}

StreamedWeights::Times StreamedWeights::take_times() {
    const Lock lock(mutex_);
    return std::exchange(times_, {});
}

}  // namespace ggpipe
