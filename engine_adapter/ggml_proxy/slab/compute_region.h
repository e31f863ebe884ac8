// The slab's low end, where the engine computes, and the boundary above it.
//
//     │ buffer A       │ buffer B │ free │  slots ...
//     │ need │         │ need │   │      │
//     └── the boundary lies at or above the end of every need ──┘
//
// A buffer has its place, of its full size, from when the engine asks for it until it is freed; but the slots leave
// only the part that the graph in the buffer needs (make_room). The boundary goes up before anything is written to that
// part. It goes down at the beginning of a graph, once misses have cost as much as a needless move would (decision
// 0010).
#pragma once

#include "abi/abi.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>

namespace expertier {

struct ProxyDevice;
class Tiers;

class ComputeRegion {
  public:
    // One buffer's place.
    struct Place {
        size_t offset = 0; // from the slab's base
        size_t size = 0;
        size_t need = 0;     // bytes that the graph in the buffer needs; 0: there is no graph
        bool holds = false;  // the slots have left these bytes, and must not come back
        std::string failure; // why something was not written; kept until a graph reports it
    };

    // Each move rewrites `compute` and the binding that it points to. Both must outlive the region.
    ComputeRegion(const expertier_compute & compute, Tiers & tiers, ProxyDevice & device, ggml_backend_buffer_t slab,
                  size_t alignment);
    ComputeRegion(const ComputeRegion &) = delete;
    ComputeRegion & operator=(const ComputeRegion &) = delete;

    // A place of `size` bytes that the slots are able to leave; null when there is none.
    Place * allocate(size_t size);
    void free(Place * place);

    void * base(const Place & place) const;
    ggml_backend_buffer_t slab() const { return slab_; }
    size_t most_bytes() const { return compute_.most_bytes; } // 0: no buffers, only moves for other numbers of slots

    // To be called when ggml begins to place a graph: the place needs nothing yet.
    void begin_placing(Place & place);
    // Says that the graph needs the first `end` bytes of the place.
    void need(Place & place, size_t end);
    // Has the slots leave what the place needs; false, with `failure` set, when they cannot.
    bool make_room(Place & place);
    // Moves the reason why something was not written to `failure`, and clears it; false when there is none.
    bool take_failure(Place & place, std::string & failure);

    // Moves the boundary down where that pays. To be called between graphs of the calling thread.
    void lower_boundary();
    void note_missed(int64_t n_bytes);
    // Asks every `look_graphs` calls whether layers should have other numbers of slots, and changes them then. To be
    // called between graphs of the calling thread.
    void follow_demand();

    // Ends all moves and allocations, because the tiers are being unbound.
    void close();

    expertier_compute_counts counts();

  private:
    bool take_hold(Place & place);
    size_t end_of(const Place & place) const;
    size_t total() const; // the lowest place that the boundary may have
    bool move(size_t n_bytes, std::string & failure);

    const expertier_compute & compute_;
    Tiers & tiers_;
    ProxyDevice & device_;
    ggml_backend_buffer_t slab_;
    char * base_;
    size_t alignment_;

    std::mutex mutex_;        // guards what follows; not held during a move
    std::list<Place> places_; // by offset; a list, so that their addresses stay
    size_t boundary_;
    int64_t missed_ = 0; // bytes missed since everything below the boundary was needed last
    bool closed_ = false;
    int n_graphs_ = 0; // since the last look
    expertier_compute_counts counts_ = {};
};

} // namespace expertier
