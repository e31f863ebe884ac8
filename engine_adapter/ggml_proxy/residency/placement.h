// Finds the matrix of the tiers that each of the engine's expert tensors stands for, and counts these tensors.
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

    // Says why a tensor in an expert buffer that stands for no matrix is refused.
    static std::string why_unknown(const ggml_tensor * tensor);

    // Counts the engine's tensors that stand for a matrix: +1 when one is made, -1 when it is freed.
    void count(MatrixRef ref, int change);
    // The name of the first matrix that has no tensor in our buffers, though its layer or a later layer has tensors
    // there; empty when there is none. The last layers may have no tensors at all, as the engine does not load layers
    // that only predict further tokens.
    std::string find_unplaced();

  private:
    struct Layer {
        std::vector<std::string> names; // of the matrices
        std::vector<int> placed;        // how many of the engine's tensors stand for each matrix
    };

    const SlotTensors & slots_;
    std::deque<Layer> layers_;
    std::mutex mutex_; // guards `placed` of all layers
};

} // namespace expertier
