// The events that tell when a piece of a prefetch has been copied. They are the same for all graphs: made once, with
// the device look-up.
#pragma once

#include "ggml-backend.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace expertier {

class PieceEvents {
  public:
    static constexpr size_t n = 2;                   // pieces that are queued at a time
    explicit PieceEvents(ggml_backend_dev_t device); // throws std::runtime_error when the device gives none
    ggml_backend_event_t operator[](uint64_t piece) const { return events_[piece % n].get(); }

  private:
    struct Free {
        void operator()(ggml_backend_event_t event) const { ggml_backend_event_free(event); }
    };
    std::array<std::unique_ptr<ggml_backend_event, Free>, n> events_;
};

} // namespace expertier
