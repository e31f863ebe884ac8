// Runs the graphs of this folder by name and copies their outputs out, so that
// tests/engine_adapter/ggml_proxy/test_expert_graphs.py can compare the proxy with the CPU device.
#include "case.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace {

using namespace expert_graphs;

enum error : int32_t {
    no_such_graph = 100,
    not_made = 101,
    not_restored = 102,
    thrown = 103
}; // beside ggml's statuses

} // namespace

// What to run, and on what. Mirrored in library.py.
struct graph_request {
    const char * name;
    void * device;                     // null: the CPU device, with the matrices' bytes
    void * experts_type;               // buffer type of the expert matrices, with `device`
    int32_t scheduled;                 // 1: through the engine's scheduler, with the CPU device as the second one
    const char * const * matrix_names; // gate, up and down of each layer
    const int32_t * matrix_types;      // ggml types of gate, up and down
    const void * const * matrix_data;  // of gate, up and down of each layer
    int64_t n;                         // elements of a row
    int64_t n_experts;
    int64_t n_used;
    int64_t n_tokens;
    uint32_t seed;          // of the random graph
    const float * x;        // [n_tokens][n]
    const int32_t * choice; // [n_tokens][n_experts]
    const float * bias;     // [n_experts][n], for `bias` and `given`
};

namespace {

const Builds & all_builds() {
    static const Builds all = [] {
        Builds found = { { "random", build_random } };
        for (Builds (*builds)() : { builds_of_nodes, builds_of_cuts, builds_of_terms, builds_of_refusals }) {
            found.merge(builds());
        }
        return found;
    }();
    return all;
}

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_name("CPU"); }

ggml_backend_ptr start(ggml_backend_dev_t device) {
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (backend && set_n_threads) {
        set_n_threads(backend.get(), 1);
    }
    return backend;
}

// The model's tensors: the expert matrices of all layers, and a bias.
struct Weights {
    ggml_context_ptr matrix_context, bias_context;
    ggml_backend_buffer_ptr matrix_buffer, bias_buffer;
    std::vector<ggml_tensor *> matrices;
    ggml_tensor * bias = nullptr;

    // Makes them; false when a buffer cannot be allocated.
    bool make(const graph_request & request, ggml_backend_dev_t device, ggml_backend_buffer_type_t experts_type) {
        matrix_context.reset(ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true }));
        bias_context.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        for (int i = 0; i < n_layers * n_matrices; i++) {
            matrices.push_back(ggml_new_tensor_3d(matrix_context.get(),
                                                  (ggml_type) request.matrix_types[i % n_matrices], request.n,
                                                  request.n, request.n_experts));
            ggml_set_name(matrices.back(), request.matrix_names[i]);
        }
        matrix_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(matrix_context.get(), experts_type));
        bias = ggml_new_tensor_2d(bias_context.get(), GGML_TYPE_F32, request.n, request.n_experts);
        bias_buffer.reset(
            ggml_backend_alloc_ctx_tensors_from_buft(bias_context.get(), ggml_backend_dev_buffer_type(device)));
        if (!matrix_buffer || !bias_buffer) {
            return false;
        }
        ggml_backend_buffer_set_usage(matrix_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_set_usage(bias_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_set(bias, request.bias, 0, ggml_nbytes(bias));
        for (size_t i = 0; device == cpu_device() && i < matrices.size(); i++) {
            ggml_backend_tensor_set(matrices[i], request.matrix_data[i], 0, ggml_nbytes(matrices[i]));
        }
        return true;
    }
};

// The case with its inputs, before a graph is built from it.
Case case_of(const graph_request & request, const Weights & weights, ggml_context * context) {
    const std::vector<ggml_tensor *> & matrices = weights.matrices;
    Case c = {};
    c.context = context;
    c.graph = ggml_new_graph(context);
    c.layers = { { matrices[0], matrices[1], matrices[2] }, { matrices[3], matrices[4], matrices[5] } };
    c.x = ggml_new_tensor_3d(c.context, GGML_TYPE_F32, request.n, 1, request.n_tokens);
    c.choice = ggml_new_tensor_2d(c.context, GGML_TYPE_I32, request.n_experts, request.n_tokens);
    c.bias = weights.bias;
    c.given = ggml_new_tensor_2d(c.context, GGML_TYPE_F32, request.n, request.n_experts);
    c.n_used = request.n_used;
    c.n_tokens = request.n_tokens;
    c.seed = request.seed;
    for (ggml_tensor * input : { c.x, c.choice, c.given }) {
        ggml_set_input(input);
    }
    return c;
}

void set_inputs(const graph_request & request, const Case & c) {
    const std::pair<ggml_tensor *, const void *> inputs[] = { { c.x, request.x },
                                                              { c.choice, request.choice },
                                                              { c.given, request.bias } };
    for (const auto & [input, data] : inputs) {
        if (input->buffer && !ggml_is_empty(input)) { // an input that this graph does not use has no memory
            ggml_backend_tensor_set(input, data, 0, ggml_nbytes(input));
        }
    }
}

std::vector<const ggml_tensor *> sources_of(ggml_cgraph * graph) {
    std::vector<const ggml_tensor *> all;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        all.insert(all.end(), node->src, node->src + GGML_MAX_SRC);
    }
    return all;
}

// Has the scheduler stop after the last node before each cut.
bool observe(ggml_tensor * node, bool ask, void * user) {
    const Case & c = *static_cast<Case *>(user);
    return !ask || std::any_of(c.cuts.begin(), c.cuts.end(),
                               [&](int cut) { return ggml_graph_node(c.graph, cut - 1) == node; });
}

// The memory of a case's nodes, and what computes them: the backend by itself, or the scheduler with the CPU beside it.
struct Computing {
    ggml_backend_ptr cpu;
    ggml_backend_sched_ptr scheduler;
    ggml_gallocr_ptr allocator;

    // Allocates the case's nodes; false when that fails. The scheduler keeps the address of the case.
    bool make(ggml_backend_t backend, Case & c, bool scheduled) {
        if (!scheduled) {
            allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
            return ggml_gallocr_alloc_graph(allocator.get(), c.graph);
        }
        cpu = start(cpu_device());
        if (!cpu) {
            return false;
        }
        ggml_backend_t backends[] = { backend, cpu.get() };
        scheduler.reset(ggml_backend_sched_new(backends, nullptr, 2, 256, false, true));
        if (!ggml_backend_sched_alloc_graph(scheduler.get(), c.graph)) {
            return false;
        }
        if (!c.cuts.empty()) {
            ggml_backend_sched_set_eval_callback(scheduler.get(), observe, &c);
        }
        return true;
    }

    ggml_status run(ggml_backend_t backend, Case & c) const {
        if (scheduler) {
            return ggml_backend_sched_graph_compute(scheduler.get(), c.graph);
        }
        int begin = 0;
        c.cuts.push_back(ggml_graph_n_nodes(c.graph));
        for (int end : c.cuts) {
            ggml_cgraph segment = ggml_graph_view(c.graph, begin, end);
            if (ggml_status status = ggml_backend_graph_compute(backend, &segment)) {
                return status;
            }
            begin = end;
        }
        return GGML_STATUS_SUCCESS;
    }
};

// Copies the outputs to `out` one after another; false when they are more than `max` values.
bool get_outputs(const Case & c, float * out, int64_t max, int64_t * n_out) {
    *n_out = 0;
    for (const ggml_tensor * output : c.outputs) {
        const int64_t n = ggml_nelements(output);
        if (*n_out + n > max) {
            return false;
        }
        ggml_backend_tensor_get(output, out + *n_out, 0, n * sizeof(float));
        *n_out += n;
    }
    return true;
}

} // namespace

// The name of the graph with this number; null behind the last.
extern "C" __attribute__((visibility("default"))) const char * expert_graph_name(int32_t number) {
    const Builds & builds = all_builds();
    return number < (int32_t) builds.size() ? std::next(builds.begin(), number)->first.c_str() : nullptr;
}

// Writes the outputs one after another to `out`, which has room for `max` values. 0, a ggml status or an `error`.
extern "C" __attribute__((visibility("default"))) int32_t run_expert_graph(const graph_request * request, float * out,
                                                                           int64_t max, int64_t * n_out) {
    const auto build = all_builds().find(request->name);
    if (build == all_builds().end()) {
        return no_such_graph;
    }
    const bool on_cpu = request->device == nullptr;
    const ggml_backend_dev_t device = on_cpu ? cpu_device() : static_cast<ggml_backend_dev_t>(request->device);
    const ggml_backend_ptr backend = start(device);
    const ggml_context_ptr nodes(ggml_init({ 256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    Weights weights;
    if (!backend || !weights.make(*request, device,
                                  on_cpu ? ggml_backend_dev_buffer_type(device)
                                         : static_cast<ggml_backend_buffer_type_t>(request->experts_type))) {
        return not_made;
    }
    Case c = case_of(*request, weights, nodes.get());
    build->second(c);

    Computing computing;
    if (!computing.make(backend.get(), c, request->scheduled != 0)) {
        return not_made;
    }
    set_inputs(*request, c);
    const auto before = sources_of(c.graph);
    ggml_status status;
    try {
        status = computing.run(backend.get(), c);
    } catch (const std::runtime_error &) { // bytes that ggml could not be given
        return thrown;
    }
    if (sources_of(c.graph) != before) {
        return not_restored;
    }
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    return get_outputs(c, out, max, n_out) ? status : (int32_t) not_made;
}
