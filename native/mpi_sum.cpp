// Sums over parts on several machines, by messages. MPI's functions come from the library that mpi4py has loaded, whichever
// that is: a handle is a pointer there, or an int, which is the low half of a register.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "group_sum.h"

namespace ggpipe {

namespace {

constexpr size_t kStatus = 64;  // bytes: an MPI_Status has at most 32
// How long a wait spins, but for threads that want the core: a message takes so long on a slow network, and MPI cannot
// wake anybody up. A sleep takes 100 us more than it was asked to, in each of many sums for a token.
constexpr std::chrono::microseconds kNetworkSpin(300);
constexpr int kPieceTag = 2;       // a tag; those of sums are 0 and 1

class MpiSum : public GroupSum {
   public:
    MpiSum(const std::string & library, uintptr_t comm, uintptr_t byte, int part, int n_parts, bool halves)
        : GroupSum(part, n_parts, 1, halves), comm_(comm), byte_(byte) {
        void * mpi = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
        isend_ = mpi ? (Transfer) dlsym(mpi, "MPI_Isend") : nullptr;
        irecv_ = mpi ? (Transfer) dlsym(mpi, "MPI_Irecv") : nullptr;
        test_ = mpi ? (int (*)(void *, int *, void *)) dlsym(mpi, "MPI_Test") : nullptr;
        if (!isend_ || !irecv_ || !test_) throw std::runtime_error("no MPI functions in " + library);
        for (Messages & m : messages_) m.boxes.reset(new uint8_t[n_parts * kOutbox]);
    }
    ~MpiSum() override {
        for (Messages & m : messages_) {
            if (!m.requests.empty()) m.boxes.release();  // a part was lost: MPI may still write there
        }
    }

    bool lost() const override { return lost_; }
    void abandon() override { lost_ = true; }

   private:
    using Transfer = int (*)(void *, int, uintptr_t, int, int, uintptr_t, void *);
    struct Messages {
        std::unique_ptr<uint8_t[]> boxes;  // of all parts; this part's own is what it sends
        std::vector<uint64_t> requests;    // that are not done
    };

    uint8_t * box(int turn, int part) { return messages_[turn].boxes.get() + part * kOutbox; }
    uint8_t * outbox(int turn) override { return box(turn, part_); }
    const uint8_t * inbox(int turn, int part, size_t) override { return box(turn, part); }

    void post(Transfer transfer, int turn, uint8_t * message, size_t bytes, int part, int tag) {
        if (lost_) return;
        messages_[turn].requests.push_back(0);
        if (transfer(message, bytes, byte_, part, tag, comm_, &messages_[turn].requests.back())) lost_ = true;
    }

    void carry(int turn, bool sums) override {
        const Piece & piece = pieces_[turn];
        for (int p = 0; p < n_parts_; p++) {
            if (p != part_) post(irecv_, turn, box(turn, p), message_bytes(range(piece, sums ? p : part_).size()), p, sums);
        }
        for (int i = 1; i < n_parts_; i++) {
            const int p = (part_ + i) % n_parts_, whose = sums ? part_ : p;  // not all to part 0 first
            post(isend_, turn, outbox(turn) + offset(piece, whose), message_bytes(range(piece, whose).size()), p, sums);
        }
    }

    // Its own messages are to be gone, too: MPI sends large ones only while it is called.
    bool arrives(int turn) override {
        using namespace std::chrono_literals;
        const auto begin = Clock::now();
        for (uint64_t & request : messages_[turn].requests) {
            for (int is_done = 0; !is_done;) {
                alignas(8) uint8_t status[kStatus];
                if (lost_) return false;
                if (test_(&request, &is_done, status)) lost_ = true;
                const auto waited = Clock::now() - begin;
                if (is_done) continue;
                if (waited < kNetworkSpin) std::this_thread::yield();
                else std::this_thread::sleep_for(std::clamp<Clock::duration>(waited / 8, 20us, 1ms));
            }
        }
        messages_[turn].requests.clear();
        return !lost_;
    }

    bool send_piece(const uint8_t * data, size_t bytes) override {
        memcpy(outbox(0), data, bytes);
        post(isend_, 0, outbox(0), bytes, 0, kPieceTag);
        return arrives(0);
    }
    bool receive_piece(int part, uint8_t * data, size_t bytes) override {
        post(irecv_, 0, box(0, part), bytes, part, kPieceTag);
        if (!arrives(0)) return false;
        memcpy(data, box(0, part), bytes);
        return true;
    }

    Transfer isend_, irecv_;
    int (*test_)(void *, int *, void *);
    const uintptr_t comm_, byte_;
    Messages messages_[2];
    std::atomic<bool> lost_{false};
};

}  // namespace

std::shared_ptr<GroupSum> mpi_sum(const std::string & library, uintptr_t comm, uintptr_t byte, int part, int n_parts, bool halves) {
    return std::make_shared<MpiSum>(library, comm, byte, part, n_parts, halves);
}

}  // namespace ggpipe
