// Sums over parts on one machine: each has outboxes in memory that all share, and a counter of what it has put into them.
//
// An outbox is no longer read when it is used again: the part has finished the piece after that one, for which all parts
// had posted, and they posted after reading it. Sums replace the part's own values, which no other part reads.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

#include "group_sum.h"

namespace ggpipe {

namespace {

constexpr uint32_t kLost = 1, kOne = 2;

// A counter that one process advances and others wait for, in steps of kOne. Its lowest bit says that a part is lost.
struct alignas(64) Counter {
    std::atomic<uint32_t> value, sleepers;

    void futex(int operation, uint32_t argument) { syscall(SYS_futex, &value, operation, argument, nullptr, nullptr, 0); }
    uint32_t steps() const { return value & ~kLost; }
    void advance() {
        value += kOne;
        if (sleepers > 0) futex(FUTEX_WAKE, INT_MAX);
    }
    void lose() {
        value |= kLost;
        futex(FUTEX_WAKE, INT_MAX);
    }
    bool reaches(uint32_t wanted) {  // waits; false: a part is lost
        const auto spins_until = Clock::now() + kSpin;
        while (true) {
            const uint32_t now = value;
            if (now & kLost) return false;
            if (int32_t(now - wanted) >= 0) return true;
            if (Clock::now() < spins_until) continue;
            sleepers++;
            futex(FUTEX_WAIT, now);
            sleepers--;
        }
    }
};

class SharedSum : public GroupSum {
   public:
    SharedSum(int fd, int part, int n_parts) : GroupSum(part, n_parts, 0, false) {
        const size_t size = n_parts * sizeof(Part);
        const int error = posix_fallocate(fd, 0, size);  // zeros, which counters begin with
        void * base = error ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) throw std::system_error(error ? error : errno, std::generic_category(), "memory that a group shares");
        parts_ = (Part *) base;
    }
    ~SharedSum() override { munmap((void *) parts_, n_parts_ * sizeof(Part)); }

    bool lost() const override { return parts_[0].posted.value & kLost; }  // the first that `abandon` marks
    void abandon() override {
        for (int p = 0; p < n_parts_; p++) {
            for (Counter * counter : {&parts_[p].posted, &parts_[p].sent, &parts_[p].taken}) counter->lose();
        }
    }

   private:
    struct Part {
        Counter posted, sent, taken;
        alignas(64) uint8_t outboxes[2][kOutbox];
        uint8_t slots[2][kOutbox];  // of pieces that are sent
    };
    uint8_t * outbox(int turn) override { return parts_[part_].outboxes[turn]; }
    const uint8_t * inbox(int turn, int part, size_t offset) override { return parts_[part].outboxes[turn] + offset; }
    void carry(int, bool) override { parts_[part_].posted.advance(); }
    bool arrives(int) override {
        step_ += kOne;
        for (int p = 0; p < n_parts_; p++) {
            if (!parts_[p].posted.reaches(step_)) return false;
        }
        return true;
    }
    bool send_piece(const uint8_t * data, size_t bytes) override {
        Part & own = parts_[part_];
        const uint32_t step = own.sent.steps();
        if (!own.taken.reaches(step - kOne)) return false;  // what was in this slot
        memcpy(own.slots[step / kOne % 2], data, bytes);
        own.sent.advance();
        return true;
    }
    bool receive_piece(int part, uint8_t * data, size_t bytes) override {
        Part & from = parts_[part];
        const uint32_t step = from.taken.steps();
        if (!from.sent.reaches(step + kOne)) return false;
        memcpy(data, from.slots[step / kOne % 2], bytes);
        from.taken.advance();
        return true;
    }

    Part * parts_;
    uint32_t step_ = 0;
};

}  // namespace

std::shared_ptr<GroupSum> shared_sum(int fd, int part, int n_parts) { return std::make_shared<SharedSum>(fd, part, n_parts); }

}  // namespace ggpipe
