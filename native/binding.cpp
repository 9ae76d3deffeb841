// The Python module `ggpipe._native`; `ggpipe/_native.pyi` says what each name does for a caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "gguf.h"
#include "ggml.h"
#include "group.h"
#include "rows.h"
#include "stage.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ggpipe;

namespace {

// The run's outgoing bytes as a bytearray. One copy: it costs less than an array that owns the vector.
nb::object take_outgoing(Stage & stage) {
    auto & out = stage.wire.out;
    return nb::steal(PyByteArray_FromStringAndSize((const char *) out.data(), out.size()));
}

// A view of any bytes-like object.
struct View {
    Py_buffer buffer = {};
    explicit View(nb::handle object) {
        if (!object.is_none() && PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~View() { PyBuffer_Release(&buffer); }
    View(const View &) = delete;
};

// Pulls the stage's mapped weights into memory, 16 MiB at a time; `progress` gets bytes done and bytes in all.
void populate(const Stage & stage, nb::callable progress) {
    constexpr size_t kStep = size_t(16) << 20, kPage = 4096;
    size_t all = 0, done = 0;
    for (auto & [data, size] : stage.mapped_ranges()) all += size;
    for (auto & [data, size] : stage.mapped_ranges()) {
        for (size_t at = 0; at < size; at += kStep) {
            const uintptr_t from = (uintptr_t(data) + at) & ~(kPage - 1);
            const size_t n = std::min(size - at, kStep);
            {
                nb::gil_scoped_release release;
                const size_t bytes = uintptr_t(data) + at + n - from;
#ifdef MADV_POPULATE_READ
                if (madvise((void *) from, bytes, MADV_POPULATE_READ) != 0)
#endif
                    for (size_t i = 0; i < bytes; i += kPage) (void) *(volatile const uint8_t *) (from + i);
            }
            if (!nb::cast<bool>(progress(done += n, all))) return;
        }
    }
    if (stage.group) stage.group->file->drop_others(stage.mapped_ranges());
}

// Gets our part of each of a group's weights; `progress` gets bytes done.
void load_slices(const Stage & stage, nb::callable progress) {
    if (!stage.group) return;
    size_t done = 0;
    while (!stage.group->left.empty()) {
        {
            nb::gil_scoped_release release;
            done += stage.group->load_next();
        }
        if (!nb::cast<bool>(progress(done))) return;
    }
}

nb::object text(const char * s) { return nb::steal(PyUnicode_DecodeUTF8(s, strlen(s), "replace")); }

nb::object gguf_value(const gguf_context * g, int64_t key) {
    switch (gguf_get_kv_type(g, key)) {
        case GGUF_TYPE_UINT8: return nb::int_(gguf_get_val_u8(g, key));
        case GGUF_TYPE_INT8: return nb::int_(gguf_get_val_i8(g, key));
        case GGUF_TYPE_UINT16: return nb::int_(gguf_get_val_u16(g, key));
        case GGUF_TYPE_INT16: return nb::int_(gguf_get_val_i16(g, key));
        case GGUF_TYPE_UINT32: return nb::int_(gguf_get_val_u32(g, key));
        case GGUF_TYPE_INT32: return nb::int_(gguf_get_val_i32(g, key));
        case GGUF_TYPE_UINT64: return nb::int_(gguf_get_val_u64(g, key));
        case GGUF_TYPE_INT64: return nb::int_(gguf_get_val_i64(g, key));
        case GGUF_TYPE_FLOAT32: return nb::float_(gguf_get_val_f32(g, key));
        case GGUF_TYPE_FLOAT64: return nb::float_(gguf_get_val_f64(g, key));
        case GGUF_TYPE_BOOL: return nb::bool_(gguf_get_val_bool(g, key));
        case GGUF_TYPE_STRING: return text(gguf_get_val_str(g, key));
        default: return nb::none();
    }
}

// An array of whole numbers or truth values, as per-layer settings are; None for others, and for those of a vocabulary.
nb::object gguf_numbers(const gguf_context * g, int64_t key) {
    constexpr size_t kMost = 1024;  // twice libllama's most layers
    const size_t n = gguf_get_arr_n(g, key);
    if (n > kMost) return nb::none();
    nb::list values;
    for (size_t i = 0; i < n; i++) {
        switch (gguf_get_arr_type(g, key)) {
            case GGUF_TYPE_INT32: values.append(((const int32_t *) gguf_get_arr_data(g, key))[i]); break;
            case GGUF_TYPE_UINT32: values.append(((const uint32_t *) gguf_get_arr_data(g, key))[i]); break;
            case GGUF_TYPE_BOOL: values.append(((const int8_t *) gguf_get_arr_data(g, key))[i] != 0); break;
            default: return nb::none();
        }
    }
    return nb::tuple(values);
}

nb::object gguf_header(nb::bytes path) {
    gguf_context * g = nullptr;
    {
        nb::gil_scoped_release release;
        g = gguf_init_from_file(path.c_str(), {/*no_alloc*/ true, /*ctx*/ nullptr});
    }
    if (!g) return nb::none();
    nb::dict metadata, lengths;
    for (int64_t i = 0; i < gguf_get_n_kv(g); i++) {
        const nb::object key = text(gguf_get_key(g, i));
        if (gguf_get_kv_type(g, i) != GGUF_TYPE_ARRAY) {
            metadata[key] = gguf_value(g, i);
            continue;
        }
        lengths[key] = gguf_get_arr_n(g, i);
        const nb::object numbers = gguf_numbers(g, i);
        if (!numbers.is_none()) metadata[key] = numbers;
    }
    nb::list tensors;
    for (int64_t i = 0; i < gguf_get_n_tensors(g); i++) {
        tensors.append(nb::make_tuple(text(gguf_get_tensor_name(g, i)), gguf_get_data_offset(g) + gguf_get_tensor_offset(g, i),
                                      gguf_get_tensor_size(g, i), ggml_type_name(gguf_get_tensor_type(g, i))));
    }
    nb::object result = nb::make_tuple(metadata, lengths, tensors, gguf_get_data_offset(g));
    gguf_free(g);
    return result;
}

nb::dict type_sizes() {
    nb::dict sizes;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const auto type = (ggml_type) i;
        if (ggml_type_size(type) > 0) sizes[ggml_type_name(type)] = nb::make_tuple(ggml_blck_size(type), ggml_type_size(type));
    }
    return sizes;
}

std::vector<std::string> cpu_features() {
    const auto list = (ggml_backend_get_features_t) cpu_function("ggml_backend_get_features");
    std::vector<std::string> names;
    for (auto * f = list(ggml_backend_dev_backend_reg(cpu_device())); f && f->name; f++) {
        names.push_back(strcmp(f->value, "1") ? std::string(f->name) + "=" + f->value : f->name);
    }
    return names;
}

std::optional<std::string> lock_memory() {
    if (mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0) return std::nullopt;
    return strerror(errno);
}

}  // namespace

NB_MODULE(_native, m) {
    try {
        check_abi();
    } catch (const std::exception & e) {
        throw nb::import_error(e.what());
    }
    nb::set_leak_warnings(false);  // objects that live until the process ends are no leak
    m.doc() = "ggml devices that hold a part of a model, the wire between them, and rows of logits. Needs llama_cpp first.";
    m.def("ggml_version", [] { return std::string(ggml_version()); }, "The loaded ggml's version.");
    m.def("cpu_features", cpu_features, "Instruction sets that ggml's CPU backend uses, NAME or NAME=VALUE.");
    m.def("gguf_header", gguf_header, "path"_a,
          nb::sig("def gguf_header(path: bytes) -> tuple[dict[str, int | float | str | bool | tuple[int, ...]], "
                  "dict[str, int], list[tuple[str, int, int, str]], int] | None"),
          "Metadata (scalars, and short arrays of whole numbers), lengths of array metadata, tensors (name, offset in the\n"
          "file, bytes, type), and where the tensors' data begin. None when the file cannot be read; ggml logs why.");
    m.def("type_sizes", type_sizes, nb::sig("def type_sizes() -> dict[str, tuple[int, int]]"),
          "Of each type that tensors may have: numbers in a block, and bytes of a block.");
    m.def("lock_memory", lock_memory, "Keep in RAM whatever this process touches. Returns why not, or None.");
    m.def("set_timer_slack", [](unsigned long ns) { prctl(PR_SET_TIMERSLACK, ns, 0, 0, 0); }, "nanoseconds"_a,
          "How late the kernel may end this thread's timed waits, and those of threads it starts.");
    m.def("top", [](uintptr_t logits, size_t n_vocab, size_t k, const std::vector<int32_t> & banned) {
        nb::gil_scoped_release release;
        TopRow row = top((const float *) logits, n_vocab, k, banned);
        return std::make_tuple(std::move(row.ids), std::move(row.logits), row.log_sum_exp);
    }, "logits"_a, "n_vocab"_a, "k"_a, "banned"_a,
       "The k best of a row of f32 logits at this address: ids and logits, best first, equal ones by id; and the row's\n"
       "log-sum-exp (not a number for k = 1). Banned tokens count as minus infinity.");

    nb::class_<MappedModel>(m, "MappedModel", "A model's files, mapped read-only.")
        .def("__init__", [](MappedModel * model, const std::vector<nb::bytes> & paths) {
            std::vector<std::string> names;
            for (const auto & path : paths) names.emplace_back(path.c_str(), path.size());
            new (model) MappedModel(names);
        }, "paths"_a);

    const auto released = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<GroupSum>(m, "GroupSum", "Adds up tensors over the parts of a group; see native/group_sum.h.")
        .def("sum", [](GroupSum & s, uintptr_t data, size_t n, bool stop) { return s.sum((float *) data, n, stop); }, "data"_a,
             "n"_a, "stop"_a, released, "Add up n floats at this address over all parts, in place. True: a part wants to stop, or is lost.")
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

    nb::class_<Stage>(m, "Stage", "The native half of ggpipe.llama.stage.Stage; see native/stage.h.")
        .def(nb::init<bool, bool, bool, bool>(), nb::kw_only(), "first"_a, "repack"_a, "exact"_a, "fast_attention"_a)
        .def("join", [](Stage & s, std::shared_ptr<MappedModel> file, int part, int n_parts, std::shared_ptr<GroupSum> sum,
                        uintptr_t ask, uintptr_t model, bool split_attention) {
            s.group = std::make_shared<Group>(s, file, part, n_parts, sum, (Group::Ask) ask, (const void *) model, split_attention);
        }, nb::kw_only(), "file"_a, "part"_a, "n_parts"_a, "sum"_a, "ask"_a, "model"_a, "split_attention"_a,
           "Before `devices`: this rank computes its layers with others. ask, model: addresses of libllama's function that\n"
           "splits weights, and of a model without weights, which `leave_model` gives back.")
        .def("leave_model", [](Stage & s) { s.group->asked.model = nullptr; }, "Once there is a context: `model` is not asked again.")
        .def("devices", [](Stage & s) {
            return std::make_tuple(uintptr_t(&s.up.dev), uintptr_t(s.group ? s.group->device : &s.local.dev), uintptr_t(&s.down.dev));
        }, "Addresses of the ggml devices UP, LOCAL and DOWN.")
        .def("begin_load", &Stage::begin_load, "mapping"_a.none(), "Before libllama loads: hide what is not ours.")
        .def("end_load", &Stage::end_load, "After libllama has loaded, or failed to.")
        .def("load_slices", load_slices, "progress"_a,
             nb::sig("def load_slices(self, progress: collections.abc.Callable[[int], bool]) -> None"),
             "In a group, after end_load: get this rank's part of each weight; tells bytes done, and stops when the answer is\n"
             "False.")
        .def("populate", populate, "progress"_a,
             nb::sig("def populate(self, progress: collections.abc.Callable[[int, int], bool]) -> None"),
             "Read the mapped weights into memory; tells bytes done and bytes in all, and stops when the answer is False.")
        .def("begin_run", [](Stage & s, int64_t run, nb::object incoming, size_t headroom) {
            View view(incoming);
            s.begin_run(run, (const uint8_t *) view.buffer.buf, view.buffer.len, headroom);
        }, "run"_a, "incoming"_a.none(), "headroom"_a,
           nb::sig("def begin_run(self, run: int, incoming: bytes | bytearray | memoryview | None, headroom: int) -> None"),
           "Before llama_decode: the bytes from the rank before this one, which must stay as they are until end_run, and\n"
           "how many bytes to leave free in front of those for the next.")
        .def("end_run", [](Stage & s) { s.end_run(); return take_outgoing(s); },
             nb::sig("def end_run(self) -> bytearray"), "After llama_decode: the headroom, then the bytes for the next rank.")
        .def("cancel", &Stage::cancel, "run"_a, "Stop this run if it is being computed. From any thread.")
        .def_rw("n_threads", &Stage::n_threads, "In a group: how many threads the next run has.")
        .def_prop_ro("lost", [](Stage & s) { return s.group && s.group->sum->lost(); }, "A part of the group is lost.")
        .def_prop_ro("unsummable", [](Stage & s) { return s.group ? s.group->unsummable : std::string(); },
                     "In a group: a tensor whose parts cannot be added up.")
        .def_prop_ro("new_graphs", [](Stage & s) { return s.group ? s.group->graphs->n_new : 0; },
                     "In a group: graphs that ggml's meta device had to divide; others were known.")
        .def_prop_ro("undividable", [](Stage & s) { return s.group ? s.group->undividable : std::string(); },
                     "In a group, after loading: a weight that is to be divided, and whose rows are one block each.")
        .def_prop_ro("columns", [](Stage & s) { return s.group->columns; },
                     "In a group of the last stage: how many columns of the last run's logits each part has, in their order.")
        .def_prop_ro("wanted", [](Stage & s) { return s.wire.wanted; }, "Tensors that the last run took from UP.")
        .def_prop_ro("produced", [](Stage & s) { return s.wire.produced; }, "Tensors that the last run gave to DOWN.")
        .def_ro("misplaced", &Stage::misplaced, "Reads from DOWN in the last run: the cut runs through a layer.")
        .def_ro("missing", &Stage::missing, "Reads from UP in the last run that it did not bring.")
        .def_prop_ro("orders_cells", [](Stage & s) { return s.exact && s.cell_order.complete; },
                     "Attention reads KV cells in order, wherever they are: it depends on no other sequence.")
        .def_prop_ro("hidden_bytes", [](Stage & s) { return s.hidden_bytes(); },
                     "Bytes of weights that libllama's loader was not shown: other ranks', and mapped ones.")
        .def_prop_ro("mapped_bytes", [](Stage & s) {
            size_t all = 0;
            for (auto & range : s.mapped_ranges()) all += range.second;
            return all;
        }, "Bytes of weights that `populate` reads.")
        .def_prop_ro("slice_bytes", [](Stage & s) { return s.group ? s.group->own_bytes : 0; }, "Bytes of weights that `load_slices` copies.");
}
