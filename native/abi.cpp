// Does the loaded ggml look as `abi.h` declares it? Asked once, when the extension is imported.
#include "abi.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "ggml.h"
#include "stage.h"

#ifndef GGPIPE_GGML_VERSION
#error "CMake names the ggml version that ggpipe is built against"
#endif

namespace ggpipe {

namespace {
void expect(bool as_declared, const char * what) {
    if (as_declared) return;
    throw std::runtime_error(std::string("ggpipe was built for ggml ") + GGPIPE_GGML_VERSION + " (backend API " +
                             std::to_string(kBackendApiVersion) + "), but ggml " + ggml_version() +
                             " is loaded and differs in its " + what +
                             ": reinstall ggpipe and llama-cpp-python so that they match");
}
}  // namespace

void check_abi() {
    ggml_backend_dev_t dev = cpu_device();
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    expect(reg->api_version == kBackendApiVersion, "backend API version");
    expect(!strcmp(reg->iface.get_name(reg), ggml_backend_reg_name(reg)) &&
               reg->iface.get_device_count(reg) == ggml_backend_reg_dev_count(reg) &&
               reg->iface.get_proc_address(reg, "ggml_backend_set_n_threads") == cpu_function("ggml_backend_set_n_threads"),
           "registry");

    ggml_backend_dev_props props = {};
    dev->iface.get_props(dev, &props);
    expect(dev->reg == reg && dev->iface.get_type(dev) == ggml_backend_dev_type(dev) && props.type == ggml_backend_dev_type(dev) &&
               dev->iface.get_buffer_type(dev) == ggml_backend_dev_buffer_type(dev) && !dev->iface.get_host_buffer_type,
           "device");

    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
    expect(!strcmp(buft->iface.get_name(buft), ggml_backend_buft_name(buft)) && buft->iface.is_host(buft) &&
               buft->iface.get_alignment(buft) == ggml_backend_buft_get_alignment(buft) &&
               dev->iface.supports_buft(dev, buft),
           "buffer type");

    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer(
        ggml_backend_buft_alloc_buffer(buft, 4096), ggml_backend_buffer_free);
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    expect(buffer->buft == buft && buffer->size == ggml_backend_buffer_get_size(buffer.get()) &&
               buffer->iface.get_base(buffer.get()) == ggml_backend_buffer_get_base(buffer.get()) &&
               buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE && buffer->iface.set_tensor && buffer->iface.clear,
           "buffer");

    std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend(ggml_backend_dev_init(dev, nullptr), ggml_backend_free);
    expect(backend->device == dev && backend->guid == ggml_backend_guid(backend.get()) &&
               !strcmp(backend->iface.get_name(backend.get()), ggml_backend_name(backend.get())) &&
               backend->iface.graph_compute && !backend->iface.synchronize,
           "backend");

    std::unique_ptr<ggml_context, decltype(&ggml_free)> memory(
        ggml_init({ggml_graph_overhead_custom(8, false) + 2 * ggml_tensor_overhead(), nullptr, true}), ggml_free);
    ggml_cgraph * graph = ggml_new_graph_custom(memory.get(), 8, false);
    ggml_tensor * source = ggml_new_tensor_1d(memory.get(), GGML_TYPE_F32, 1);
    ggml_build_forward_expand(graph, ggml_neg(memory.get(), source));
    size_t place = 0;  // index into `source`; unused places hold arbitrary values
    const auto & table = graph->visited;
    while (place < table.size && !((table.used[place / 32] >> place % 32) & 1 && table.keys[place] == source)) place++;
    expect(graph->size == ggml_graph_size(graph) && graph->n_nodes == 1 && graph->n_leafs == 1 && graph->leafs[0] == source &&
               graph->nodes == ggml_graph_nodes(graph) && table.size >= 16 && place < table.size && graph->use_counts[place] == 1,
           "graph");
}

}  // namespace ggpipe
