#include "prefetch/piece_events.h"

#include <stdexcept>

namespace expertier {

PieceEvents::PieceEvents(ggml_backend_dev_t device) {
    for (auto & event : events_) {
        event.reset(ggml_backend_event_new(device));
        if (!event) {
            throw std::runtime_error("the device gave no event for prefetches");
        }
    }
}

} // namespace expertier
