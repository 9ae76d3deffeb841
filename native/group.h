// A stage of several ranks. LOCAL is then ggml's meta device over N devices, one for each part of the group: ours is real,
// the others are hollow, as UP and DOWN. The meta device cuts each weight among them, and stops wherever parts must be
// summed. All ranks build the same graph, so all stop at the same places.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group_graphs.h"
#include "group_sum.h"
#include "stage.h"

namespace ggpipe {

struct Group {
    using Split = ggml_backend_meta_split_state;
    using Ask = Split (*)(const ggml_tensor *, void *);    // libllama's, which is not in llama.h
    struct Asked { size_t n_parts; const void * model; };  // its second argument
    struct Extra { ggml_backend_buffer_t real, label; };   // a type that repacks; `label` says a weight is of it
    struct Left { ggml_tensor * whole; std::string name; size_t own_bytes; };
    struct Cut { int axis; std::vector<int64_t> pieces; std::vector<std::pair<int64_t, uint32_t>> segments; };  // see ggpipe/llama/group_cuts.py
    using Cuts = std::map<std::string, Cut>;

    // `model`: one without weights that knows the parts' shares. split_attention: libllama cuts attention; else only FFN and
    // output. cuts: of weights that libllama is not asked for. Throws std::runtime_error when libllama's function is not the
    // one declared here.
    Group(Stage & stage, int part, int n_parts, std::shared_ptr<GroupSum> sum, Ask ask, const void * model, bool split_attention, Cuts cuts);
    ~Group();

    // After libllama has loaded: gets our part of the next weight that its loader was not shown. Where the stage uses weights
    // in place, so are rows that lie in the file together. Returns how many bytes were copied; nothing at the end.
    std::optional<size_t> load_next();
    size_t own_bytes = 0;    // of our parts that were or will be copied
    std::vector<Left> left;  // the last one comes next

    void begin_run();
    void pause();  // see Stage
    void resume();
    bool is_paused() const { return graphs == &graphs_in_pauses; }
    bool stopped = false;          // all parts agreed to end this run
    std::vector<int64_t> columns;  // of each part, of the logits that were last read, where this stage is the last one

    ggml_backend_dev_t device = nullptr;  // the meta device
    Asked asked;                          // `model` is needed until there is a context
    const std::shared_ptr<GroupSum> sum;
    std::string unsummable;               // a tensor that cannot be summed here
    std::string undividable;              // a weight whose rows are one block each, which ggml's meta device cannot cut

    // For the devices' functions.
    void check_split();
    Extra * repacker_of(ggml_tensor * slice);
    void add_up(ggml_tensor * slice);
    Stage & stage;
    const int part;
    const Ask ask;
    const bool split_attention;
    const Cuts cuts;
    GroupGraphs own_graphs, graphs_in_pauses;  // of the two contexts
    GroupGraphs * graphs = &own_graphs;        // of the one in which a run is computed
    std::vector<std::unique_ptr<Device>> hollow;
    std::map<const ggml_tensor *, Split> splits;          // of weights and KV caches: their names are hidden at times
    std::map<std::string, ggml_tensor *> wholes;          // the weights
    std::map<std::string, ggml_op> ops;                   // what libllama does with each
    std::map<std::string, const ggml_tensor *> own_cells; // our slices of the KV caches
    std::vector<Extra> extras;
    const Range * source = nullptr;                       // of the weight being loaded, where it may be used in the file
    bool in_place = false;                                // it is
    std::vector<uint8_t> gathered;                        // a slice that came in pieces, to be repacked as a whole
    size_t n_gathered = 0;
};

}  // namespace ggpipe
