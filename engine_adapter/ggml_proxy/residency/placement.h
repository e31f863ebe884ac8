// Which of the engine's tensors stand for which matrix of the tiers.
#pragma once

#include "residency/slot_tensors.h"

#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace expertier {

class Placement {
  public:
    Placement(const expertier_binding & binding, const SlotTensors & slots);

    // Finds the matrix that the engine's tensor stands for, and checks type, shape and expert stride against it.
    bool find(const ggml_tensor * tensor, MatrixRef & ref) const;
    bool has_matrix(const char * name) const;

    // Why a tensor in an expert buffer is refused that stands for no matrix.
    static std::string why_unknown(const ggml_tensor * tensor);

    // Counts the engine's tensors that stand for a matrix: +1 when one is made, -1 when it is freed.
    void count(MatrixRef ref, int change);
    // The first matrix that has no tensor in our buffers though its layer or a later one has; empty: there is none.
    // Layers at the end may have none at all: engines leave out the ones that only predict further tokens.
    std::string find_unplaced();

  private:
    struct Layer {
        std::vector<std::string> names; // of the matrices
        std::vector<int> placed;        // the engine's tensors of each
    };

    const SlotTensors & slots_;
    std::deque<Layer> layers_;
    std::mutex mutex_; // guards `placed` of all layers
};

} // namespace expertier
