// The slab's low end, where the engine computes, and the boundary above it.
//
//     │ buffer A       │ buffer B │ free │  slots ...
//     │ need │         │ need │   │      │
//     └── the boundary lies at or above the end of every need ──┘
//
// A buffer has its place from when the engine asks for it until it is freed, and place for all of its size; but the
// slots leave only what the graph that is placed in it needs (make_room). The boundary goes up before anything is
// written there, and down at the begin of a graph, once misses have cost what a needless move would (decision 0010).
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
        size_t need = 0;     // of the graph that is placed there; 0: none is
        bool holds = false;  // the slots have left that, and must stay away
        std::string failure; // why something was not written, until a graph has told
    };

    // `compute`, and the binding that it points to, are rewritten by each move, and outlive this.
    ComputeRegion(const expertier_compute & compute, Tiers & tiers, ProxyDevice & device, ggml_backend_buffer_t slab,
                  size_t alignment);
    ComputeRegion(const ComputeRegion &) = delete;
    ComputeRegion & operator=(const ComputeRegion &) = delete;

    // A place for `size` bytes that the slots can leave; null when there is none.
    Place * allocate(size_t size);
    void free(Place * place);

    void * base(const Place & place) const;
    ggml_backend_buffer_t slab() const { return slab_; }
    size_t most_bytes() const { return compute_.most_bytes; } // 0: it is there for the numbers of slots only

    // A graph is about to be placed: nothing is needed yet.
    void begin_placing(Place & place);
    // It needs the first `end` bytes.
    void need(Place & place, size_t end);
    // Has the slots leave what the place needs; false, with `failure` set, when they cannot.
    bool make_room(Place & place);
    // Tells, once, that something was not written; false when all was.
    bool take_failure(Place & place, std::string & failure);

    // Moves the boundary down where that pays. Between graphs of the calling thread.
    void lower_boundary();
    void note_missed(int64_t n_bytes);
    // Has the layers have other numbers of slots where demand says so; looks now and then. Between graphs as well.
    void follow_demand();

    // No more moves: the tiers are going away.
    void close();

    expertier_compute_counts counts();

  private:
    bool take_hold(Place & place);
    size_t end_of(const Place & place) const;
    size_t total() const; // the lowest that the boundary may lie
    bool move(size_t n_bytes, std::string & failure);

    const expertier_compute & compute_;
    Tiers & tiers_;
    ProxyDevice & device_;
    ggml_backend_buffer_t slab_;
    char * base_;
    size_t alignment_;

    std::mutex mutex_;        // guards what follows; not held during a move
    std::list<Place> places_; // by offset; they do not move in memory
    size_t boundary_;
    int64_t missed_ = 0; // bytes since all below the boundary was needed
    bool closed_ = false;
    int n_graphs_ = 0; // since the last look
    expertier_compute_counts counts_ = {};
};

} // namespace expertier
