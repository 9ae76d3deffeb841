// Operations of recurrent layers; see recurrent.cpp.
#pragma once

#include <cstdint>

#include "attention.h"
#include "ggml.h"

namespace ggpipe {

constexpr int kStateRows = 4;  // of a delta net at a time

struct DeltaNetTask {  // some rows of the state of one head of one sequence
    const ggml_tensor * node;
    const float * from;  // all states of the sequence, before
    float * to;          // and after
    int64_t head, sequence, first_row, end_row;
    Scratch & scratch;
};

constexpr int kScanRows = 8;  // of a state space

struct ScanTask {  // some rows of the state of one sequence
    const ggml_tensor * node;
    const float * from;  // all of its rows, before
    float * to;          // and after
    int64_t sequence, first_row, end_row;
};
void avx512_delta_net(const DeltaNetTask & task);
void avx2_delta_net(const DeltaNetTask & task);
void avx512_scan(const ScanTask & task);
void avx2_scan(const ScanTask & task);

}  // namespace ggpipe
