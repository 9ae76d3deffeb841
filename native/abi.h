// The part of ggml's backend interface that a device of our own must speak: API version 2 (ggml 0.25).
//
// ggml keeps these structs in a header that its package does not install, so they are declared here from the
// facts of that version. Members that ggpipe never calls or fills are named for what they are, but untyped
// (`Unused`); their order and number is what counts. `check_abi` compares them with what ggml's public
// functions say of the CPU backend before anything relies on them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml-backend.h"

namespace ggpipe {

constexpr int kBackendApiVersion = 2;
using Unused = void (*)();

// Throws std::runtime_error, naming both versions, when the loaded ggml is not laid out as declared below.
void check_abi();

}  // namespace ggpipe

extern "C" {

struct ggml_backend_buffer_type_i {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};
struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void * (*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t offset, size_t size);
    void (*set_tensor_2d)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t offset, size_t size, size_t times, size_t step, size_t step_there);
    ggpipe::Unused get_tensor_2d;
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst);
    void (*clear)(ggml_backend_buffer_t, uint8_t value);
    ggpipe::Unused reset;
};
struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void * context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    ggpipe::Unused async_copies[5];  // set, get, set 2d, get 2d, copy
    ggpipe::Unused synchronize;
    ggpipe::Unused graph_plans[4];  // create, free, update, compute
    ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph *);
    ggpipe::Unused event_record, event_wait, graph_optimize;
};
struct ggml_backend {
    ggml_guid_t guid;
    ggml_backend_i iface;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_device_i {
    const char * (*get_name)(ggml_backend_dev_t);
    const char * (*get_description)(ggml_backend_dev_t);
    void (*get_memory)(ggml_backend_dev_t, size_t * free, size_t * total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props *);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char * params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
    ggpipe::Unused buffer_from_host_ptr;
    bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor * op);
    bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    ggpipe::Unused offload_op;
    ggpipe::Unused events[3];  // new, free, synchronize
};
struct ggml_backend_device {
    ggml_backend_device_i iface;
    ggml_backend_reg_t reg;
    void * context;
};

struct ggml_backend_reg_i {
    const char * (*get_name)(ggml_backend_reg_t);
    size_t (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t index);
    void * (*get_proc_address)(ggml_backend_reg_t, const char * name);
};
struct ggml_backend_reg {
    int api_version;
    ggml_backend_reg_i iface;
    void * context;
};

struct ggml_cgraph {
    int size, n_nodes, n_leafs;
    ggml_tensor ** nodes, ** grads, ** grad_accs, ** leafs;
    int32_t * use_counts;  // by places in the table below
    struct { size_t size; uint32_t * used; ggml_tensor ** keys; } visited;
    int order;
    uint64_t uid;
};

GGML_API ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, ggml_backend_buffer_i,
                                                        void * context, size_t size);
}
