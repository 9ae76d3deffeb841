// Sums over the parts of a group, whatever carries the bytes. Not MPI_Allreduce: it does not promise equal bits everywhere.
//
// A small sum is one message from each part to each other. Where that would be many bytes, each part adds up a range for all
// (reduce-scatter) and sends the others its sums (allgather). A large sum goes in pieces, of which the next may be on its way
// while one is finished. What the parts want rides in the head of the first messages.
//
// As 16-bit floats, all parts' values are rounded before they are added up as 32-bit floats, each by at most 2^-11 of itself,
// and so are sums that are sent on; what 16 bits cannot hold becomes +-65504. All parts still get equal bits.
#include "group_sum.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ggml.h"

namespace ggpipe {

namespace {

constexpr size_t kExtra = 24 << 10;  // bytes that a part sends in about the time that one more message takes
constexpr size_t kBlock = 1024, kLine = 16;  // floats: what is added up at a time, and a cache line
constexpr float kLargestHalf = 65504;

struct alignas(16) Head { uint32_t n, wants; };

// ggml's CPU backend converts many times as fast as ggml's base, which is always available.
template <class F> F * fastest(const char * name, F * base) {
    void * found = dlsym(RTLD_DEFAULT, name);
    return found ? (F *) found : base;
}
const auto to_halves = fastest("ggml_cpu_fp32_to_fp16", ggml_fp32_to_fp16_row);
const auto to_floats = fastest("ggml_cpu_fp16_to_fp32", ggml_fp16_to_fp32_row);

}  // namespace

GroupSum::GroupSum(int part, int n_parts, size_t ahead, bool halves)
    : part_(part), n_parts_(n_parts), ahead_(ahead), halves_(halves), terms_(n_parts) {
    if (n_parts < 2 || n_parts > kMostParts || part < 0 || part >= n_parts) throw std::invalid_argument("parts of a group");
}

GroupSum::Range GroupSum::range(const Piece & piece, int part) const {
    if (!piece.shares) return {0, piece.n};
    const size_t lines = (piece.n + kLine - 1) / kLine;
    return {std::min(piece.n, lines * part / n_parts_ * kLine), std::min(piece.n, lines * (part + 1) / n_parts_ * kLine)};
}

size_t GroupSum::message_bytes(size_t n) const { return sizeof(Head) + n * (halves_ ? sizeof(ggml_fp16_t) : sizeof(float)); }

size_t GroupSum::offset(const Piece & piece, int part) const { return piece.shares ? kOutbox / n_parts_ / 64 * 64 * part : 0; }

void GroupSum::pack(uint8_t * message, const float * data, size_t n, uint32_t wants) const {
    const Head head = {uint32_t(n), wants};
    memcpy(message, &head, sizeof head);
    if (!halves_) return void(memcpy(message + sizeof head, data, n * sizeof(float)));
    float block[kBlock];
    for (size_t at = 0; at < n; at += kBlock) {
        const size_t m = std::min(kBlock, n - at);
        for (size_t i = 0; i < m; i++) block[i] = std::min(std::max(data[at + i], -kLargestHalf), kLargestHalf);
        to_halves(block, (ggml_fp16_t *) (message + sizeof head) + at, m);
    }
}

// out = the first message's values + the second's + ..., in this order.
void GroupSum::add(const std::vector<const uint8_t *> & messages, size_t n, float * out) const {
    float unpacked[kBlock];
    for (size_t at = 0; at < n; at += kBlock) {
        const size_t m = std::min(kBlock, n - at);
        for (const uint8_t * message : messages) {
            const auto * values = (const float *) (message + sizeof(Head)) + at;
            if (halves_) to_floats((const ggml_fp16_t *) (message + sizeof(Head)) + at, unpacked, m), values = unpacked;
            if (message == messages[0]) memcpy(out + at, values, m * sizeof(float));
            else for (size_t i = 0; i < m; i++) out[at + i] += values[i];
        }
    }
}

uint32_t GroupSum::sum(float * data, size_t n, uint32_t wants) {
    if (!timed_) return add_up(data, n, wants);
    const auto start = Clock::now();
    wants = add_up(data, n, wants);
    times_.emplace_back(n, std::chrono::duration<double>(Clock::now() - start).count());
    return wants;
}

std::vector<std::pair<size_t, double>> GroupSum::take_times() {
    timed_ = true;
    return std::exchange(times_, {});
}

uint32_t GroupSum::add_up(float * data, size_t n, uint32_t wants) {
    const size_t n_pieces = n ? (n + kPiece - 1) / kPiece : 1, first = first_;
    first_ += n_pieces;
    for (size_t begun = 0, ended = 0; ended < n_pieces; ended++) {
        for (; begun < n_pieces && begun <= ended + ahead_; begun++) {
            start((first + begun) % 2, data + begun * kPiece, std::min(kPiece, n - begun * kPiece), wants);
        }
        if (!finish((first + ended) % 2, wants)) return kStop;
    }
    return wants;
}

void GroupSum::send(const void * data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kOutbox) {
        if (!send_piece((const uint8_t *) data + at, std::min(kOutbox, bytes - at))) return;
    }
}

void GroupSum::receive(int part, void * data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kOutbox) {
        uint8_t * to = (uint8_t *) data + at;
        if (!receive_piece(part, to, std::min(kOutbox, bytes - at))) return void(memset(to, 0, bytes - at));
    }
}

void GroupSum::start(int turn, float * data, size_t n, uint32_t wants) {
    if (lost()) return;
    const size_t others = n_parts_ - 1;
    Piece & piece = pieces_[turn] = {data, n, others * (others - 1) * message_bytes(n) > n_parts_ * kExtra};
    for (int p = 0; p < n_parts_; p++) {
        const Range r = range(piece, p);
        if (p == 0 || piece.shares) pack(outbox(turn) + offset(piece, p), data + r.begin, r.size(), wants);
    }
    carry(turn, false);
}

bool GroupSum::finish(int turn, uint32_t & wants) {
    const Piece & piece = pieces_[turn];
    const Range own = range(piece, part_);
    uint8_t * const mine = outbox(turn) + offset(piece, part_);
    if (!arrives(turn)) return false;
    for (int p = 0; p < n_parts_; p++) {
        terms_[p] = p == part_ ? mine : inbox(turn, p, offset(piece, part_));
        Head head;
        memcpy(&head, terms_[p], sizeof head);
        if (head.n != own.size()) abandon();  // it computes another graph
        wants |= head.wants;
    }
    add(terms_, own.size(), piece.data + own.begin);
    if (!piece.shares) return !lost();
    pack(mine, piece.data + own.begin, own.size(), wants);
    carry(turn, true);
    if (!arrives(turn)) return false;
    for (int p = 0; p < n_parts_; p++) {
        const Range r = range(piece, p);
        add({p == part_ ? mine : inbox(turn, p, offset(piece, p))}, r.size(), piece.data + r.begin);
    }
    return true;
}

}  // namespace ggpipe
