// One expert's way into its slot before its layer's look-up asks for it.
//
//     Free ─ begun ─► Copying ─ all pieces queued ─► Queued ─ complete ─► Landed ─ the look-up arrives ─► Free
//                        │                             │
//                        │ the look-up arrives:        ├ and wants it ────────► Arriving ─ complete ─► Free
//                        ├ and wants it: the rest is   │
//                        │ queued at once, then as ──► │
//                        │ from Queued                 └ and does not want it ► Unwanted ─ complete ─► Free
//                        │
//                        └ and does not want it ─────────────────────────────► Dropped ── complete ─► Free
//
// "Complete" means that nothing of it is left in the stream of uploads. A run that stops treats every prefetch as one
// that its look-up does not want.
//
//     state      the policy's slot      the layer's table on the device names the slot
//     Copying    FILLING                no
//     Queued     FILLING                yes, behind the bytes
//     Unwanted   FILLING, then READY    yes, behind the bytes
//     Landed     READY                  yes
//     Arriving   READY                  yes; the look-up's answer waits for the bytes
//     Dropped    FILLING, then FREE     no
#pragma once

#include "residency/pool_copies.h"

#include <cstddef>
#include <cstdint>
#include <optional>

namespace expertier {

struct Prefetch {
    enum class State { Free, Copying, Queued, Unwanted, Landed, Arriving, Dropped };

    State state = State::Free;
    int layer = -1;
    int32_t expert = -1, slot = -1;
    const char * copy = nullptr;  // the expert's bytes in the host pool
    HostReads reads;              // held while a copy may read those bytes
    size_t piece = 0, offset = 0; // what is queued next
    int64_t n_bytes = 0;          // queued so far
    // The number of the last paced piece. Nothing where the last piece was queued without an event: the prefetch is
    // complete once the stream of uploads has been waited for.
    std::optional<uint64_t> last_piece;

    bool awaits_lookup() const { return state == State::Copying || state == State::Queued || state == State::Landed; }
    // Whether waiting for the stream of uploads makes the policy's slot READY or FREE.
    bool is_filling_at_device() const {
        return state == State::Queued || state == State::Unwanted || state == State::Dropped;
    }
    bool is_complete(uint64_t n_pieces_done) const { return last_piece && *last_piece <= n_pieces_done; }
};

} // namespace expertier
