// The buffer type of expert tensors that ggml's Meta backend splits over several of our devices.
//
//     Meta device of the engine  ─► its buffer type ─► the devices' own buffer types: attention, shared experts, biases
//     Meta device of ours        ─► its buffer type ─► our expert buffer types:       shards of experts
//
// A Meta device has one buffer type, which it makes of its devices' default types. So we make a second Meta device over
// the same devices, while these devices name their expert buffer types as their defaults. The engine's Meta device
// accepts buffers of our type, because it only compares the devices that a Meta device consists of.
#pragma once

#include "ggml-backend.h"

namespace expertier {

// While an object of this class lives, a proxy that its thread asks for the default buffer type answers with the expert
// buffer type.
class ExpertsAsDefault {
  public:
    ExpertsAsDefault() { is_on_ = true; }
    ~ExpertsAsDefault() { is_on_ = false; }
    ExpertsAsDefault(const ExpertsAsDefault &) = delete;
    ExpertsAsDefault & operator=(const ExpertsAsDefault &) = delete;

    static bool is_on() { return is_on_; }

  private:
    static inline thread_local bool is_on_ = false;
};

} // namespace expertier
