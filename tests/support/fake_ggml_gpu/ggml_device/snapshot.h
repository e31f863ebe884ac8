// A graph as it is when it is handed over, in memory of its own: the caller may change or free his tensors as soon as
// the call returns, as he may on a device that takes kernels into a queue.
#pragma once

#include "ggml_device/device.h"

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

namespace fake_gpu {

class Snapshot {
  public:
    // Of all nodes, with the addresses of the bytes in place of the device's. What a computed node may not use on
    // `device` is told in problem().
    Snapshot(const Device & device, const ggml_cgraph * graph);

    const std::string & problem() const { return problem_; }
    ggml_cgraph * graph() { return graph_; }

    // Says which memory the graph is about to read and write. Of experts, those that the ids choose which are there.
    void touch_memory() const;

  private:
    ggml_tensor * copy(const ggml_tensor * tensor);
    void check(const ggml_tensor * node, const ggml_tensor * used);
    void touch_experts(const ggml_tensor * node, const std::string & what) const;
    bool computes(const ggml_tensor * mine) const;

    struct FreeContext {
        void operator()(ggml_context * context) const { ggml_free(context); }
    };

    const Device & device_;
    std::deque<ggml_tensor> tensors_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    ggml_cgraph * graph_ = nullptr;
    std::string problem_;
};

} // namespace fake_gpu
