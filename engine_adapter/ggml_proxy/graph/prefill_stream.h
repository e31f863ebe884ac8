// Streams whole layers past the slots. Device memory has two places, each with room for all experts of one layer in the
// order of their numbers. While one layer computes in its place, the next layer is uploaded to the other place, on a
// stream of its own. No expert is evicted from a slot for that.
#pragma once

#include "abi/abi.h"
#include "backend/device_memory.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "residency/pool_copies.h"

#include <memory>
#include <mutex>
#include <vector>

namespace expertier {

class Tiers;

class PrefillStream {
  public:
    // Throws std::runtime_error when the device has no room for the two places.
    PrefillStream(Tiers & tiers, const expertier_binding & binding, ggml_backend_dev_t device);
    PrefillStream(const PrefillStream &) = delete;
    PrefillStream & operator=(const PrefillStream &) = delete;

    // One graph's use of the places; the graphs of other contexts wait until it ends.
    class Use {
      public:
        Use(PrefillStream & stream, ggml_backend_t compute)
            : stream_(stream), guard_(stream.mutex_), compute_(compute) {}
        ~Use();
        Use(const Use &) = delete;
        Use & operator=(const Use &) = delete;

        // Brings `experts` of `layer` to a place, for what is queued on the graph's stream from now on; false after an
        // error. Everything that reads the layer brought before must have been queued.
        bool bring(int layer, const std::vector<int32_t> & experts);
        // The matrix of number `index` of all experts of the layer that was brought last.
        ggml_tensor * matrix(int index) const;

      private:
        void leave_place();

        PrefillStream & stream_;
        std::lock_guard<std::mutex> guard_;
        ggml_backend_t compute_;
        int place_ = -1; // no layer has been brought yet
        int layer_ = -1;
    };

    // To be called before `compute` is freed: waits for its work on streamed layers, because an event may refer to the
    // backend that it was recorded on, as Vulkan's do.
    void forget(ggml_backend_t compute);

  private:
    struct FreeContext {
        void operator()(ggml_context * context) const { ggml_free(context); }
    };
    struct FreeBackend {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
    };
    struct FreeEvent {
        void operator()(ggml_backend_event_t event) const { ggml_backend_event_free(event); }
    };
    using Event = std::unique_ptr<ggml_backend_event, FreeEvent>;

    static constexpr int n_places = 2;
    struct Place {
        ~Place(); // unshares the buffer, even where a later place finds no memory and the constructor throws
        Buffer buffer;
        void * address = nullptr;         // the address by which Python knows the place
        Event uploaded, copied, computed; // null where the device has no events; then streams are drained instead
        bool was_used = false;            // `computed` has been recorded
        ggml_backend_t user = nullptr;    // the backend that `computed` was recorded on
        int layer = -1;                   // the layer whose slots are in `held`
        std::vector<int32_t> held;        // slots that the upload copies from
        HostReads reads;
        std::vector<std::vector<ggml_tensor *>> matrices; // of each layer
    };

    bool upload(Place & place, int layer, const std::vector<int32_t> & experts, ggml_backend_t compute);
    void queue_after_computing(Place & place, ggml_backend_t stream) const;
    void end_stream(const Event & done, ggml_backend_t stream, ggml_backend_t compute) const;
    void end_upload(Place & place); // waits for the upload, and releases the slots and copies that it read
    void record_computed(Place & place, ggml_backend_t compute);

    Tiers & tiers_;
    std::mutex mutex_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    std::unique_ptr<ggml_backend, FreeBackend> uploader_; // copies from the host
    std::unique_ptr<ggml_backend, FreeBackend> copier_;   // copies from slots; kernels may delay these, so uploads have
                                                          // a stream of their own and keep the link busy
    Place places_[n_places];
    int next_ = 0;
};

} // namespace expertier
