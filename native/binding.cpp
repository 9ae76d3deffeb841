// The Python module `ggpipe._native`; `ggpipe/_native.pyi` says what each name does for a caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "fast.h"
#include "grammar_guard.h"
#include "group.h"
#include "stage.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ggpipe;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N> using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

NB_MODULE(_native, m) {
    try {
        check_abi();
    } catch (const std::exception & e) {
        throw nb::import_error(e.what());
    }
    nb::set_leak_warnings(false);  // objects that live until the process ends are no leak
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    m.doc() = "ggml devices that hold a part of a model, the wire between them, and rows of logits. Needs llama_cpp first.";
    m.def("ggml_version", [] { return std::string(ggml_version()); }, "The loaded ggml's version.");
    m.def("top", [](uintptr_t logits, size_t n_vocab, size_t k, std::vector<int32_t> banned, bool sums,
                    double temperature) {
        return top((const float *) logits, n_vocab, k, std::move(banned), sums, temperature);
    }, "logits"_a, "n_vocab"_a, "k"_a, "banned"_a, "sums"_a = true, "temperature"_a = 0, released,
       "The k best of a row of f32 logits at this address: ids and logits, best first, equal ones by id; with sums the\n"
       "row's log-sum-exp (not a number for k = 1); and with a temperature above 0 the share of the probability that ids\n"
       "smaller than each have, at this temperature, as the log-sum-exp. Banned tokens count as minus infinity.");
    m.def("draw", [](uintptr_t logits, size_t n_vocab, const std::vector<int32_t> & banned, float temperature, double number) {
        return draw((const float *) logits, n_vocab, banned, temperature, number);
    }, "logits"_a, "n_vocab"_a, "banned"_a, "temperature"_a, "number"_a, released,
       "The token that llama.cpp draws from a row of f32 logits at this address with a random number from 0 to 1.");
    m.def("likely", [](uintptr_t logits, size_t n_vocab, const std::vector<int32_t> & banned, float min_p) {
        return likely((const float *) logits, n_vocab, banned, min_p);
    }, "logits"_a, "n_vocab"_a, "banned"_a, "min_p"_a, released,
       "Ids and logits of all tokens at least min_p times as probable as the best one of a row at this address, by id.");

    m.def("multiply", [](int type, std::pair<int64_t, int64_t> shape, const Bytes & weights, std::vector<float> activations,
                         int64_t n_matrices, std::vector<int32_t> experts, int n_threads, bool repack, bool fast) {
        const Product product{ggml_type(type), shape.second, shape.first, n_matrices, {weights.data(), weights.data() + weights.size()},
                              std::move(activations), std::move(experts)};
        nb::gil_scoped_release release;
        return multiply(product, n_threads, repack, fast);
    }, nb::kw_only(), "type"_a, "shape"_a, "weights"_a, "activations"_a, "n_matrices"_a = 0, "experts"_a = std::vector<int32_t>(),
       "n_threads"_a = 1, "repack"_a = true, "fast"_a = true,
       nb::sig("def multiply(*, type: int, shape: tuple[int, int], weights: bytes, activations: Sequence[float], n_matrices: int = 0, "
               "experts: Sequence[int] = (), n_threads: int = 1, repack: bool = True, fast: bool = True) -> list[float]"),
       "One product alone, as a stage computes it, for tests and measurements: weights (rows, columns) of a ggml type, as in a\n"
       "file, and activations (tokens, columns). With n_matrices, that many of them: experts, with the same number of them per\n"
       "token, or heads' own, each for its share of the tokens. Returns (tokens, rows), or (tokens, experts of each, rows).\n"
       "fast: with kernels of our own. Raises RuntimeError.");

    m.def("kernel_names", [](int type, bool is_repacked, const std::vector<std::string> & features) {
        return kernel_names(ggml_type(type), is_repacked, features);
    }, "type"_a, "is_repacked"_a, "features"_a,
          "Of our own kernels on a CPU with these features (avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16): for products with weights\n"
          "of a ggml type, and for attention. Empty: ggml's own. Raises RuntimeError.");
    m.def("attend", [](const Array<float, 3> & queries, const Array<uint8_t, 3> & keys, const Array<uint8_t, 3> & values,
                       std::pair<int, int> types, const Array<uint16_t, 2> & mask, const std::optional<Array<float, 1>> & sinks,
                       float max_bias, float softcap, int n_threads, bool fast) {
        const ggml_type key_type = ggml_type(types.first), value_type = ggml_type(types.second);
        const int64_t value_width = values.shape(2) / ggml_type_size(value_type) * ggml_blck_size(value_type);
        const AttentionShape shape{int64_t(queries.shape(2)), value_width, int64_t(queries.shape(1)), int64_t(keys.shape(1)),
                                   int64_t(queries.shape(0)), int64_t(keys.shape(0)), key_type, value_type, sinks.has_value(), max_bias, softcap};
        nb::gil_scoped_release release;
        return attend(shape, {queries.data(), keys.data(), values.data(), mask.data(), sinks ? sinks->data() : nullptr}, n_threads, fast);
    }, nb::kw_only(), "queries"_a, "keys"_a, "values"_a, "types"_a, "mask"_a, "sinks"_a = nb::none(), "max_bias"_a = 0, "softcap"_a = 0,
       "n_threads"_a = 1, "fast"_a = true,
       "One flash attention alone, as a stage computes it, for tests: f32 queries (rows, heads, width), keys and values (cells,\n"
       "KV heads, bytes) of ggml types, a mask (rows, cells) as the bits of f16 numbers, an f32 sink of each head, and ALiBi's\n"
       "bias and the cap of scores (0: none). Returns (rows, heads, width). fast: with our own kernel. Raises RuntimeError.");
    m.def("index_cells", [](const Array<float, 3> & queries, const Array<uint8_t, 2> & keys, int key_type, const Array<float, 2> & weights,
                            const Array<uint16_t, 2> & mask, int64_t n_selected, int n_threads, bool fast) {
        const IndexerShape shape{int64_t(queries.shape(2)), int64_t(queries.shape(1)), int64_t(queries.shape(0)), int64_t(keys.shape(0)),
                                 n_selected, ggml_type(key_type)};
        nb::gil_scoped_release release;
        return index_cells(shape, {queries.data(), keys.data(), weights.data(), mask.data()}, n_threads, fast);
    }, nb::kw_only(), "queries"_a, "keys"_a, "key_type"_a, "weights"_a, "mask"_a, "n_selected"_a, "n_threads"_a = 1, "fast"_a = true,
       "One indexer of sparse attention alone, as a stage computes it, for tests: f32 queries (rows, heads, width), keys (cells,\n"
       "bytes) of a ggml type, weights of the heads (rows, heads), and a mask (rows, cells) as the bits of f16 numbers. Returns\n"
       "scores (rows, cells), and the cells of the highest ones (rows, n_selected). fast: with our own kernels. Raises\n"
       "RuntimeError.");
    m.def("sum_experts", sum_experts, nb::kw_only(), "experts"_a, "weights"_a, "n_used"_a, "n_threads"_a = 1, "fast"_a = true, released,
          "Results of experts (tokens, experts, columns), weighted by (tokens, experts) and added up as a stage does it (fast: with our\n"
          "own kernel). For tests.");
    m.def("read_pages", read_pages, "address"_a, "size"_a, released,
          "Read a part of a mapped file into memory. Returns an error number, or 0.");
    m.def("join", [](int type, const std::vector<int64_t> & shape, const nb::bytes & data, const std::vector<int64_t> & shape2, const nb::bytes & data2,
                     int dim, int n_threads) {
        const std::string joined = join(ggml_type(type), {shape, {data.c_str(), data.size()}}, {shape2, {data2.c_str(), data2.size()}}, dim, n_threads);
        return nb::bytes(joined.data(), joined.size());
    }, nb::kw_only(), "type"_a, "shape"_a, "data"_a, "shape2"_a, "data2"_a, "dim"_a, "n_threads"_a = 1,
       "Two tensors one after another along a dimension, as a stage joins them with our own kernel. Shapes have four dimensions, the\n"
       "first of which is along rows. For tests. Raises RuntimeError.");
    m.def("normalize", normalize, nb::kw_only(), "rows"_a, "width"_a, "stride"_a, "weights"_a = std::vector<float>(), "is_l2"_a = false,
          "n_threads"_a = 1, "fast"_a = true, released,
          "Root mean square norms, or L2 norms, of the first `width` of each `stride` numbers, times weights (width) if there are any, as\n"
          "a stage computes them (fast: with our own kernel). For tests. Raises RuntimeError.");
    m.def("time_attention", [](int64_t width, std::pair<int64_t, int64_t> n_heads, int64_t n_rows, int64_t n_cells, int type, int n_threads, int n_rounds) {
        return time_attention({width, width, n_heads.first, n_heads.second, n_rows, n_cells, ggml_type(type), ggml_type(type), false, 0, 0},
                              n_threads, n_rounds);
    }, nb::kw_only(), "width"_a, "n_heads"_a, "n_rows"_a, "n_cells"_a, "type"_a, "n_threads"_a, "n_rounds"_a, released,
       "Seconds of one flash attention in each round, with ggml's kernel and with our own. n_heads: of queries, and of keys and\n"
       "values, which have a ggml type. Raises RuntimeError.");

    nb::class_<GrammarGuard>(m, "GrammarGuard", "Whether libllama can follow a grammar within a limit of steps; see native/grammar_guard.cpp.")
        .def("__init__", [](GrammarGuard * g, const std::vector<nb::bytes> & pieces, uintptr_t rules, uintptr_t stacks) {
            std::vector<std::string> spellings;
            for (const auto & piece : pieces) spellings.emplace_back(piece.c_str(), piece.size());
            new (g) GrammarGuard(spellings, rules, stacks);
        }, "pieces"_a, "rules"_a, "stacks"_a,
           "Spelling of each token; addresses of llama_grammar_get_rules and llama_grammar_get_stacks.")
        .def("can_try", [](const GrammarGuard & g, uintptr_t sampler, nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids,
                           size_t steps) { return g.can_try(sampler, ids.data(), ids.shape(0), steps); },
             "sampler"_a, "ids"_a, "steps"_a, "Whether it can be asked which of these tokens fit. sampler: its address.")
        .def("can_accept", &GrammarGuard::can_accept, "sampler"_a, "id"_a, "steps"_a, "Whether it can advance by this token.");

    nb::class_<GroupSum>(m, "GroupSum", "Adds up tensors over the parts of a group; see native/group_sum.h.")
        .def("sum", [](GroupSum & s, uintptr_t data, size_t n, bool stop) {
            return bool(s.sum((float *) data, n, stop ? uint32_t(GroupSum::kStop) : 0) & GroupSum::kStop);
        }, "data"_a,
             "n"_a, "stop"_a, released, "Add up n floats at this address over all parts, in place. True: a part wants to stop, or is lost.")
        .def("take_times", &GroupSum::take_times,
             "How many floats each sum since the last call had, and its seconds. The first call begins to measure.")
        .def("send", [](GroupSum & s, uintptr_t data, size_t bytes) { s.send((const void *) data, bytes); }, "data"_a, "bytes"_a,
             released, "Send bytes at this address to part 0.")
        .def("receive", [](GroupSum & s, int part, uintptr_t data, size_t bytes) { s.receive(part, (void *) data, bytes); },
             "part"_a, "data"_a, "bytes"_a, released, "On part 0: what a part sends, to this address.")
        .def("abandon", &GroupSum::abandon, "Have each call return at once, from now on. From any thread.")
        .def_prop_ro("lost", &GroupSum::lost, "A part is lost, or the others were abandoned.");
    m.def("shared_sum", shared_sum, "fd"_a, "part"_a, "n_parts"_a,
          "Over parts on one machine, which share this empty file in memory; it may be closed afterwards. Raises RuntimeError.");
    m.def("mpi_sum", mpi_sum, "library"_a, "comm"_a, "byte"_a, "part"_a, "n_parts"_a, nb::kw_only(), "halves"_a,
          "Over MPI: mpi4py's file, handles of a communicator of the parts, for this alone, and of MPI_BYTE. `halves`: values\n"
          "travel as 16-bit floats. Raises RuntimeError.");

    m.def("replace_memory", [](uintptr_t context, uintptr_t own, uintptr_t shared) {
        return replace_memory((void *) context, (const void *) own, (void *) shared);
    }, "context"_a, "own"_a, "shared"_a,
          "Give a llama_context another's memory, or take it back, by their addresses. False if the pointer to `own` was not found.");
    nb::class_<Stage>(m, "Stage", "The native half of ggpipe.llama.stage.Stage; see native/stage.h.")
        .def(nb::init<bool, bool, bool, bool, bool>(), nb::kw_only(), "first"_a, "repack"_a, "exact"_a, "fast_kernels"_a,
             "touch_cells"_a = false)
        .def_prop_rw("last_layers", [](const Stage & s) { return std::pair(s.up.last_layer, s.local.last_layer); },
                     [](Stage & s, std::pair<int, int> last) { std::tie(s.up.last_layer, s.local.last_layer) = last; },
                     "The last layer before this rank's, and the last of its own; -1 where no other rank's layer follows.")
        .def("join", [](Stage & s, int part, int n_parts, std::shared_ptr<GroupSum> sum, uintptr_t ask, uintptr_t model, bool split_attention,
                         const std::map<std::string, std::tuple<int, std::vector<int64_t>, std::vector<std::pair<int64_t, uint32_t>>>> & cuts) {
            Group::Cuts own;
            for (const auto & [name, cut] : cuts) own[name] = {std::get<0>(cut), std::get<1>(cut), std::get<2>(cut)};
            s.group = std::make_shared<Group>(s, part, n_parts, sum, (Group::Ask) ask, (const void *) model, split_attention, own);
        }, nb::kw_only(), "part"_a, "n_parts"_a, "sum"_a, "ask"_a, "model"_a, "split_attention"_a, "cuts"_a,
           "Before `devices`: this rank computes its layers with others. ask, model: addresses of libllama's function that\n"
           "splits weights, and of a model without weights, which `leave_model` gives back. cuts: of weights for which it is\n"
           "not asked, as in ggpipe.llama.group_cuts.Cut.")
        .def("leave_model", [](Stage & s) { s.group->asked.model = nullptr; }, "Once there is a context: `model` is not asked again.")
        .def("devices", [](Stage & s) {
            return std::make_tuple(uintptr_t(&s.up.dev), uintptr_t(s.group ? s.group->device : &s.local.dev), uintptr_t(&s.down.dev));
        }, "Addresses of the ggml devices UP, LOCAL and DOWN.")
        .def("begin_load", &Stage::begin_load, "file"_a, nb::kw_only(), "use_in_place"_a,
             "Before libllama loads: hide what is not ours. file: each tensor's address and bytes in the mapped file, which\n"
             "stays mapped as long as the model is there.")
        .def("stream", [](Stage & s, const std::vector<std::string> & paths, const std::map<std::string, std::tuple<int, uint64_t, size_t>> & places,
                          size_t memory, int n_readers) {
            std::map<std::string, StreamedWeights::Place> own;
            for (const auto & [name, place] : places) own[name] = {std::get<0>(place), std::get<1>(place), std::get<2>(place)};
            s.streamed = std::make_unique<StreamedWeights>(paths, std::move(own), memory, n_readers);
        }, nb::kw_only(), "paths"_a, "places"_a, "memory"_a, "n_readers"_a,
           "Before libllama loads: keep at most this many bytes of weights in memory, and read the others from these files when they\n"
           "are needed. places: number of the file, offset and bytes of each tensor. Raises RuntimeError.")
        .def("begin_streaming", [](Stage & s) { return std::pair(s.streamed->begin(), s.streamed->memory()); },
             "After end_load: begin to read the weights that stay in memory. Returns the minimum memory and the memory given, in\n"
             "bytes; nothing is read if the latter is smaller.")
        .def("end_load", &Stage::end_load, "loaded"_a, "After libllama has loaded the model, or failed to.")
        .def("load_next", [](Stage & s) {
            const std::optional<size_t> copied = s.group ? s.group->load_next() : s.repack_next();
            return copied || !s.streamed ? copied : s.streamed->load_next();
        }, released,
             "After end_load: repack some weights; in a group, get this rank's part of the next one. After begin_streaming: wait for\n"
             "weights that stay in memory. Returns how many bytes were copied or read; None at the end. Raises RuntimeError.")
        .def("take_stream_times", [](Stage & s) {
            const StreamedWeights::Times times = s.streamed->take_times();
            return std::make_tuple(times.bytes_read, times.waited_s, times.n_predicted, times.n_right);
        }, "Since the last call: bytes of weights that were read, seconds that computing waited for them, how many matrices of\n"
           "experts were prefetched by prediction, and how many of these were used.")
        .def_prop_ro("streamed_bytes", [](Stage & s) { return s.streamed ? s.streamed->bytes_streamed() : 0; },
                     "Bytes of matrices that each run reads from files.")
        .def_prop_ro("stream_problem", [](Stage & s) { return s.streamed ? s.streamed->problem() : std::string(); },
                     "Why streamed weights could not be read.")
        .def("begin_run", [](Stage & s, int64_t run, const std::optional<Bytes> & incoming, size_t headroom) {
            s.begin_run(run, incoming ? incoming->data() : nullptr, incoming ? incoming->size() : 0, headroom);
        }, "run"_a, "incoming"_a.none(), "headroom"_a,
           nb::sig("def begin_run(self, run: int, incoming: bytes | bytearray | memoryview | None, headroom: int) -> None"),
           "Before llama_decode: the bytes from the rank before this one, which must stay as they are until end_run, and\n"
           "how many bytes to leave free in front of those for the next.")
        .def("want_hidden", [](Stage & s, int64_t width, bool skips_logits) {
            s.hidden_width = width;
            s.skips_logits = skips_logits;
        }, "width"_a, "skips_logits"_a,
           "For runs from now on: keep the last hidden state of rows that are given out, which has so many numbers a row (0:\n"
           "do not). skips_logits: their logits are not wanted, and not computed.")
        .def_prop_ro("hidden", [](Stage & s) { return nb::bytes(s.hidden.data(), s.hidden.size()); },
                     "The last hidden state of the last run's rows that are given out, as floats, row by row.")
        .def("end_run", [](Stage & s) {  // one copy, which costs less than an array that owns the vector
            s.end_run();
            return nb::bytearray(s.wire.out.data(), s.wire.out.size());
        }, "After llama_decode: the headroom, then the bytes for the next rank.")
        .def_rw("touch_cells", &Stage::touch_cells, "KV cells of contexts that are made from now on get their memory when they are made.")
        .def_rw("pauses", &Stage::pauses, "The next run pauses between two of its layers where that is wanted.")
        .def_ro("pause_places", &Stage::pause_places, "Places in the last graph at which it might have paused.")
        .def_rw("at_pause", &Stage::at_pause, nb::for_setter(nb::arg("value").none()), "Called there. It must not raise.")
        .def_rw("continues", &Stage::continues, "Times a pause: so long a run continues at least before the next one.")
        .def("want_pause", [](Stage & s) { s.wants_pause = true; }, "Have the run that is computed pause, if it does so. From any thread.")
        .def("copy_state", [](const Stage & s, int from, int to) { s.states.copy(from, to); }, "seq"_a, "other"_a, "Copy the states of a sequence's compressors to another id.")
        .def("pause", &Stage::pause, "In `at_pause`: other runs follow, in another context.")
        .def("resume", &Stage::resume, "After them.")
        .def("cancel", &Stage::cancel, "run"_a, "Stop this run if it is being computed. From any thread.")
        .def_prop_rw("n_threads", [](Stage & s) { return s.threads.n; }, [](Stage & s, int n) { s.threads.n = n; },
                     "In a group: how many threads the next run has.")
        .def_prop_ro("waits", [](Stage & s) { return std::pair(s.threads.n_waits, s.threads.n_operations); },
                     "With our own kernels: how often the threads waited for each other in the last run, and how many operations it had.")
        .def_prop_ro("lost", [](Stage & s) { return s.group && s.group->sum->lost(); }, "A part of the group is lost.")
        .def_prop_ro("unsummable", [](Stage & s) { return s.group ? s.group->unsummable : std::string(); },
                     "In a group: a tensor whose parts cannot be added up.")
        .def_prop_ro("undividable", [](Stage & s) { return s.group ? s.group->undividable : std::string(); },
                     "In a group, after loading: a weight that is to be divided, and whose rows are one block each.")
        .def_prop_ro("new_graphs", [](Stage & s) { return s.group ? s.group->graphs->n_new : 0; },
                     "In a group: graphs that ggml's meta device had to divide; others were known.")
        .def_prop_ro("columns", [](Stage & s) { return s.group->columns; },
                     "In a group of the last stage: how many columns of the last run's logits each part has, in their order.")
        .def_prop_ro("wanted", [](Stage & s) { return s.wire.wanted; }, "Tensors that the last run took from UP.")
        .def_prop_ro("wanted_row_bytes", [](Stage & s) { return s.wire.wanted_rows; },
                     "After a run of one token: the bytes of each of these; 0 where more tokens might not come one after another.")
        .def_prop_ro("produced", [](Stage & s) { return s.wire.produced; }, "Tensors that the last run gave to DOWN.")
        .def_ro("misplaced", &Stage::misplaced, "Reads from DOWN in the last run: the cut runs through a layer.")
        .def_ro("missing", &Stage::missing, "Reads from UP in the last run that it did not bring.")
        .def_prop_ro("orders_cells", [](Stage & s) { return s.exact && s.cell_order.complete; },
                     "Attention reads KV cells in order, wherever they are: it depends on no other sequence.")
        .def_ro("weights", &Stage::weights, "Names of the weights that this rank reads, of whole tensors where it reads slices.")
        .def_ro("hidden_bytes", &Stage::hidden_bytes,
                "Bytes of weights that libllama's loader was not shown: other ranks', mapped ones, and those repacked from a map.")
        .def_ro("mapped_bytes", &Stage::mapped_bytes, "Bytes of weights that are used in the mapped file.")
        .def_ro("mapped_ranges", &Stage::mapped_ranges, "Where those are: addresses and bytes.")
        .def_prop_ro("slice_bytes", [](Stage & s) {
            return (s.group ? s.group->own_bytes : s.bytes_to_repack) + (s.streamed ? s.streamed->bytes_to_load() : 0);
        }, "Bytes of weights that `load_next` copies or reads.");
}
