// The buffer type of expert tensors that ggml's Meta backend splits over several of our devices.
//
//     Meta device of the engine  ─► its buffer type ─► the devices' own buffer types: attention, shared experts, biases
//     Meta device of ours        ─► its buffer type ─► our expert buffer types:       shards of experts
//
// A Meta device has one buffer type, which it makes of its devices' default types. So ours is a second Meta device over
// the same devices, made while these name their expert buffer types as defaults. The engine's Meta device accepts
// buffers of our type, because it compares the devices below.
#pragma once

#include "ggml-backend.h"

namespace expertier {

// While one lives, a proxy that this thread asks for its default buffer type answers with that of its experts.
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
