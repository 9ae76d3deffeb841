// What the parts of a tensor-parallel group send each other while they compute: sums, and what only part 0 puts together.
//
// All parts compute the same graph, so they make the same calls in the same order, from the thread that computes and
// without the GIL. There is one object for each group, in each part's process; its kinds differ in what carries the bytes.
#pragma once

#include <cstddef>

namespace ggpipe {

struct GroupSum {
    virtual ~GroupSum() = default;

    // Adds up all parts' `data` (n floats), in the parts' order, in place: all parts get equal bits. `stop`: this part
    // wants to end its run. Returns true when any part wants to, the same on all parts; or when a part is lost, and then
    // the data are of no use.
    virtual bool sum(float * data, size_t n, bool stop) = 0;

    // From parts 1 and up to part 0: slices of a result that only part 0 needs whole, such as the logits. Part 0 asks for
    // one part's slice after the other, and each part sends its own without waiting for the others; a part may be in its
    // next sum before part 0 has received. When a part is lost, both return at once, the bytes received being zeros.
    virtual void send(const void * data, size_t bytes) = 0;
    virtual void receive(int part, void * data, size_t bytes) = 0;

    // A part is lost: from then on each call returns at once.
    virtual bool lost() const = 0;
};

}  // namespace ggpipe
