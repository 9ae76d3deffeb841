// What the parts of a tensor-parallel group send each other while they compute: sums, and what only part 0 puts together.
//
// All parts compute the same graph, so they make the same calls in the same order, from the thread that computes and
// without the GIL. There is one object for each group, in each part's process; its kinds differ in what carries the bytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ggpipe {

class GroupSum {
   public:
    virtual ~GroupSum() = default;

    // Adds up all parts' `data` (n floats), in the parts' order, in place: all parts get equal bits. `wants`: what this part
    // wants. Returns what any part wants, the same on all parts; kStop when a part is lost, and then the data are of no use.
    enum Wants : uint32_t { kStop = 1, kPause = 2 };  // to end its run, or to pause it
    uint32_t sum(float * data, size_t n, uint32_t wants);

    // How many floats each sum since the last call had, and its seconds. The first call begins to measure.
    std::vector<std::pair<size_t, double>> take_times();

    // From parts 1 and up to part 0: what only part 0 needs, such as the best logits. Part 0 asks for one part's after the
    // other, and each part sends its own without waiting for the others; a part may be in its next sum before part 0 has
    // received. When a part is lost, both return at once, the bytes received being zeros.
    void send(const void * data, size_t bytes);
    void receive(int part, void * data, size_t bytes);

    // A part is lost: from then on each call returns at once.
    virtual bool lost() const = 0;

    // Gives up on the other parts, as if one was lost. From any thread, such as the one that watches heartbeats.
    virtual void abandon() = 0;

   protected:
    static constexpr size_t kPiece = 32768;                             // floats, at most
    static constexpr size_t kOutbox = 2 * kPiece * sizeof(float);       // bytes: a piece, and a head for each part
    static constexpr int kMostParts = 256;
    struct Range { size_t begin, end, size() const { return end - begin; } };
    struct Piece {  // of a sum
        float * data;
        size_t n;
        bool shares;  // each part adds up a range for all others
    };
    GroupSum(int part, int n_parts, size_t ahead, bool halves);

    const int part_, n_parts_;
    Piece pieces_[2];  // in turn

    // The range of a piece that a part adds up; bytes of a message with n values; where a part's message begins in an outbox.
    Range range(const Piece & piece, int part) const;
    size_t message_bytes(size_t n) const;
    size_t offset(const Piece & piece, int part) const;

    // What carries the messages of a piece: every part's values, each to the part that adds them up; then, if parts share
    // the work, every part's sums to all others. `carry` lets go of what is in the outbox, and `arrives` waits for others'.
    virtual uint8_t * outbox(int turn) = 0;
    virtual const uint8_t * inbox(int turn, int part, size_t offset) = 0;  // what a part put there for this one
    virtual void carry(int turn, bool sums) = 0;
    virtual bool arrives(int turn) = 0;  // false: a part is lost

    // For `send` and `receive`, at most kOutbox bytes. false: a part is lost.
    virtual bool send_piece(const uint8_t * data, size_t bytes) = 0;
    virtual bool receive_piece(int part, uint8_t * data, size_t bytes) = 0;

   private:
    uint32_t add_up(float * data, size_t n, uint32_t wants);
    void start(int turn, float * data, size_t n, uint32_t wants);
    bool finish(int turn, uint32_t & wants);
    void pack(uint8_t * message, const float * data, size_t n, uint32_t wants) const;
    void add(const std::vector<const uint8_t *> & messages, size_t n, float * out) const;
    const size_t ahead_;  // pieces that are carried while one is finished
    const bool halves_;
    size_t first_ = 0;  // of the next sum's pieces, counted from the first sum on
    std::vector<const uint8_t *> terms_;
    bool timed_ = false;
    std::vector<std::pair<size_t, double>> times_;
};

// A wait spins for as long as a wake-up takes, and then it sleeps.
using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kSpin(50);

// Parts on one machine. `fd`: an empty file in memory that they share, which stays open. Throws std::system_error.
std::shared_ptr<GroupSum> shared_sum(int fd, int part, int n_parts);

// Parts on several machines. `library`: the file of mpi4py's MPI module. `comm`: the handle of a communicator that returns
// errors, of the parts in their order, for this alone; `byte`: MPI_BYTE's. MPI supports threads at level MULTIPLE.
// `halves`: values travel as 16-bit floats, see group_sum.cpp. Throws std::runtime_error.
std::shared_ptr<GroupSum> mpi_sum(const std::string & library, uintptr_t comm, uintptr_t byte, int part, int n_parts, bool halves);

}  // namespace ggpipe
