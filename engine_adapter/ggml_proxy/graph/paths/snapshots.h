// Copies of a chain's inputs. Writing the output of one pass may overwrite the inputs, because the engine's allocator
// takes their memory as free by then.
#pragma once

#include "graph/paths/chain.h"
#include "ggml-backend.h"

#include <unordered_map>

namespace expertier {

// A ggml context that is freed at the end of the scope.
struct ScopedContext {
    explicit ScopedContext(size_t n_tensors, size_t n_nodes = 0)
        : context(ggml_init(
              { n_tensors * ggml_tensor_overhead() + (n_nodes ? ggml_graph_overhead_custom(n_nodes, false) : 0),
                nullptr, true })) {}
    ~ScopedContext() { ggml_free(context); }
    ScopedContext(const ScopedContext &) = delete;
    ScopedContext & operator=(const ScopedContext &) = delete;
    ggml_context * context;
};

// A tensor over the same memory, without a link to the graph that `tensor` is a node of.
ggml_tensor * without_graph(ggml_context * context, const ggml_tensor * tensor);

class Snapshots {
  public:
    static constexpr size_t max_inputs = 8;

    Snapshots() = default;
    ~Snapshots() { ggml_backend_buffer_free(buffer_); }
    Snapshots(const Snapshots &) = delete;
    Snapshots & operator=(const Snapshots &) = delete;

    // Copies the chain's inputs (at most max_inputs) as they are now; false when memory ran out.
    bool take(ggml_backend_t backend, const ExpertChain & chain);

    // Copies again the inputs that the nodes from `begin` to before `end` have just computed.
    void retake(const ggml_cgraph * graph, int begin, int end);

    // The copy of `input`, or `input` itself where no copy was taken.
    const ggml_tensor * of(const ggml_tensor * input) const;

  private:
    void copy(const ggml_tensor * input);

    ScopedContext scope_{ 4 * max_inputs }; // the copies, and an alias for each time that an input is copied
    ggml_backend_buffer_t buffer_ = nullptr;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
};

} // namespace expertier
