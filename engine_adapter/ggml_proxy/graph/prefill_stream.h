// Layers that pass by: two places in device memory, each for all experts of one layer in their own order. While a layer
// computes in one place, the next is uploaded to the other, on a stream of its own. Nothing is evicted for it.
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
    // Throws std::runtime_error when the device has no room for it.
    PrefillStream(Tiers & tiers, const expertier_binding & binding, ggml_backend_dev_t device);
    PrefillStream(const PrefillStream &) = delete;
    PrefillStream & operator=(const PrefillStream &) = delete;

    // One graph's use of the places; other contexts wait meanwhile.
    class Use {
      public:
        Use(PrefillStream & stream, ggml_backend_t compute)
            : stream_(stream), guard_(stream.mutex_), compute_(compute) {}
        ~Use();
        Use(const Use &) = delete;
        Use & operator=(const Use &) = delete;

        // Has `experts` of `layer` in a place for what is queued on the graph's stream from now on; false after an
        // error. Everything that reads the layer before must have been queued.
        bool bring(int layer, const std::vector<int32_t> & experts);
        // One matrix of all experts of the layer that was brought last.
        ggml_tensor * matrix(int index) const;

      private:
        void leave_place();

        PrefillStream & stream_;
        std::lock_guard<std::mutex> guard_;
        ggml_backend_t compute_;
        int place_ = -1; // none yet
        int layer_ = -1;
    };

    // Waits for what `compute` has to do on streamed layers, before it is freed: an event may refer to the backend that
    // it was recorded on, as Vulkan's do.
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
        ~Place(); // also of those that there were when the next one found no memory
        Buffer buffer;
        void * address = nullptr;         // by which Python knows it
        Event uploaded, copied, computed; // null where the device has no events: then streams are drained
        bool was_used = false;            // `computed` has been recorded
        ggml_backend_t user = nullptr;    // on which
        int layer = -1;                   // whose slots are held
        std::vector<int32_t> held;        // slots that the upload copies from
        HostReads reads;
        std::vector<std::vector<ggml_tensor *>> matrices; // of each layer
    };

    bool upload(Place & place, int layer, const std::vector<int32_t> & experts, ggml_backend_t compute);
    void queue_after_computing(Place & place, ggml_backend_t stream) const;
    void end_stream(const Event & done, ggml_backend_t stream, ggml_backend_t compute) const;
    void end_upload(Place & place); // waits for it, and lets go of what it read
    void record_computed(Place & place, ggml_backend_t compute);

    Tiers & tiers_;
    std::mutex mutex_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    std::unique_ptr<ggml_backend, FreeBackend> uploader_; // from the host
    std::unique_ptr<ggml_backend, FreeBackend> copier_;   // from slots: kernels may hold these up, but not the link
    Place places_[n_places];
    int next_ = 0;
};

} // namespace expertier
