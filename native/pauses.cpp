// A prompt's long run pauses between two of its layers, so that others' short runs need not wait for its end.
//
// libllama cannot decode two batches in turn in one context. So there is a second context of the same model, for short runs, and both
// have the same KV cells: what one takes, the other sees. libllama has no call for that, but a context owns its memory by a single
// pointer, which is replaced here. In between, the long run's activations stay where they are, in buffers of its context. Both work
// on different sequences, so neither reads cells that the other writes.
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "group.h"

namespace ggpipe {

namespace {
// libllama's names of the hidden state after a layer's attention or recurrent part, and after the whole layer.
bool ends_part(const ggml_tensor * node) {
    constexpr const char * names[] = {"l_out-", "ffn_inp-", "attn_residual-", "ffn_residual-", "nemotron_h_block_out-", "hc_attn_post-", "hc_ffn_post-"};
    return std::any_of(std::begin(names), std::end(names), [node](const char * name) { return !strncmp(node->name, name, strlen(name)); });
}
}  // namespace

ggml_status compute_with_pauses(Stage & stage, const ggml_cgraph * graph, const Compute & compute) {
    ggml_status status = GGML_STATUS_SUCCESS;
    stage.pause_places = -1;
    for (int from = 0, to; from < graph->n_nodes && status == GGML_STATUS_SUCCESS; from = to) {
        for (to = from + 1; to < graph->n_nodes && !ends_part(graph->nodes[to - 1]);) to++;
        ggml_cgraph part = *graph;
        part.nodes += from;
        part.n_nodes = to - from;
        if (part.n_nodes < graph->n_nodes) part.uid = 0;  // a graph of its own
        stage.pause_places++;
        status = compute(&part);
        if (status == GGML_STATUS_SUCCESS && to < graph->n_nodes && stage.pause_is_due()) stage.at_pause();
    }
    return status;
}

bool Stage::pause_is_due() { return wants_pause && Clock::now() >= pauses_from_ && wants_pause.exchange(false); }

void Stage::pause() {
    paused_at_ = Clock::now();
    paused_.emplace(PausedRun{
        current_run_, std::move(wire), std::move(hidden), hidden_width, skips_logits, pauses, passing, threads, misplaced, missing});
    wire = {};
    pauses = false;
    if (group) group->pause();
    end_run();
}

void Stage::resume() {
    current_run_ = paused_->run;
    wire = std::move(paused_->wire);
    hidden = std::move(paused_->hidden);
    hidden_width = paused_->hidden_width;
    skips_logits = paused_->skips_logits;
    passing = paused_->passing;
    threads = paused_->threads;
    misplaced = paused_->misplaced;
    missing = paused_->missing;
    pauses = paused_->pauses;
    if (group) group->resume();
    paused_.reset();
    const auto now = Clock::now();
    pauses_from_ = now + std::chrono::duration_cast<Clock::duration>(continues * (now - paused_at_));
}

bool replace_memory(void * context, const void * own, void * shared) {
    void ** const words = (void **) context;
    void ** place = nullptr;
    for (size_t i = 0; i < malloc_usable_size(context) / sizeof *words; i++) {
        if (words[i] != own) continue;
        if (place) return false;
        place = &words[i];
    }
    if (place) *place = shared;
    return place;
}

}  // namespace ggpipe
