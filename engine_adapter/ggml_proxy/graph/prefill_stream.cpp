#include "graph/prefill_stream.h"

#include "ggml-backend-impl.h"
#include "residency/tiers.h"

#include <algorithm>
#include <stdexcept>

namespace expertier {

PrefillStream::PrefillStream(Tiers & tiers, const expertier_binding & binding, ggml_backend_dev_t device)
    : tiers_(tiers) {
    uint64_t largest = 0;
    size_t n_matrices = 0;
    for (int i = 0; i < binding.n_layers; i++) {
        largest = std::max(largest, binding.layers[i].streamed_bytes);
        n_matrices += binding.layers[i].n_matrices;
    }
    context_.reset(ggml_init({ (n_places * n_matrices + 1) * ggml_tensor_overhead(), nullptr, true }));
    uploader_.reset(ggml_backend_dev_init(device, nullptr));
    copier_.reset(ggml_backend_dev_init(device, nullptr));
    for (Place & place : places_) {
        place.buffer = new_device_buffer(device, largest);
        if (!place.buffer || !uploader_ || !copier_) {
            throw std::runtime_error("it has no room for the two layers of " + std::to_string((largest >> 20) + 1) +
                                     " MiB that large batches pass through, or no stream for them; lower "
                                     "MOE_EXPERT_CACHE_MIB, or set MOE_PREFILL_STREAM_TOKENS=0");
        }
        place.address = share_buffer(place.buffer.get());
        place.uploaded.reset(ggml_backend_event_new(device));
        place.copied.reset(ggml_backend_event_new(device));
        place.computed.reset(ggml_backend_event_new(device));
        char * base = static_cast<char *>(ggml_backend_buffer_get_base(place.buffer.get()));
        for (int i = 0; i < binding.n_layers; i++) {
            const expertier_layer & layer = binding.layers[i];
            auto & all = place.matrices.emplace_back();
            for (int j = 0; j < layer.n_matrices; j++) {
                const expertier_matrix & matrix = layer.matrices[j];
                ggml_tensor * tensor = ggml_new_tensor_3d(context_.get(), (ggml_type) matrix.type, matrix.ne0,
                                                          matrix.ne1, layer.n_experts);
                tensor->nb[2] = matrix.streamed_stride;
                tensor->nb[3] = matrix.streamed_stride * layer.n_experts;
                tensor->data = base + matrix.streamed_offset;
                tensor->buffer = place.buffer.get();
                ggml_format_name(tensor, "%s.streamed", matrix.name);
                all.push_back(tensor);
            }
        }
    }
}

PrefillStream::Place::~Place() {
    if (buffer) {
        unshare_buffer(buffer.get());
    }
}

bool PrefillStream::Use::bring(int layer, const std::vector<int32_t> & experts) {
    leave_place();
    place_ = stream_.next_;
    stream_.next_ = (stream_.next_ + 1) % n_places;
    layer_ = layer;
    return stream_.upload(stream_.places_[place_], layer, experts, compute_);
}

ggml_tensor * PrefillStream::Use::matrix(int index) const { return stream_.places_[place_].matrices[layer_][index]; }

void PrefillStream::Use::leave_place() {
    if (place_ >= 0) {
        Place & place = stream_.places_[place_];
        stream_.record_computed(place, compute_);
        stream_.end_upload(place);
        place_ = -1;
    }
}

PrefillStream::Use::~Use() { leave_place(); }

bool PrefillStream::upload(Place & place, int layer, const std::vector<int32_t> & experts, ggml_backend_t compute) {
    ggml_backend_t uploader = uploader_.get();
    queue_after_computing(place, uploader);
    queue_after_computing(place, copier_.get());
    std::vector<int32_t> others; // neither in a slot nor in the host pool; allocated before anything is held
    others.reserve(experts.size());
    place.reads = HostReads(tiers_.host_copies(), experts.size());
    place.layer = layer;
    place.held = tiers_.tables().pin_ready(layer, experts);
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(place.buffer.get()));

    int64_t n_bytes = 0;
    for (size_t i = 0; i < experts.size(); i++) {
        const char * copy = place.held[i] < 0 ? place.reads.take(layer, experts[i]) : nullptr;
        if (place.held[i] < 0 && copy == nullptr) {
            others.push_back(experts[i]);
            continue;
        }
        for (const expertier_copy & piece : tiers_.slots().copies(layer)) {
            ggml_tensor target = bytes_at(
                place.buffer.get(), base + piece.streamed_offset + experts[i] * piece.streamed_stride, piece.n_bytes);
            if (copy) {
                ggml_backend_tensor_set_async(uploader, &target, copy + piece.source, 0, piece.n_bytes);
                n_bytes += (int64_t) piece.n_bytes;
            } else {
                ggml_tensor source = tiers_.slots().piece(place.held[i], piece);
                ggml_backend_tensor_copy_async(copier_.get(), copier_.get(), &source, &target);
            }
        }
    }
    bool is_complete = true;
    if (!others.empty()) {
        if (place.was_used && place.computed) {
            ggml_backend_event_synchronize(place.computed.get()); // Python's copies do not wait for our streams
        }
        is_complete = tiers_.misses().load(layer, others, place.address);
        for (const expertier_copy & piece : tiers_.slots().copies(layer)) {
            n_bytes += (int64_t) (piece.n_bytes * others.size());
        }
    }
    tiers_.counters.streamed_calls += 1;
    tiers_.counters.streamed_bytes += n_bytes;
    end_stream(place.uploaded, uploader, compute);
    end_stream(place.copied, copier_.get(), compute);
    return is_complete;
}

void PrefillStream::queue_after_computing(Place & place, ggml_backend_t stream) const {
    if (place.was_used && place.computed) {
        ggml_backend_event_wait(stream, place.computed.get());
    }
}

// Has what is queued on `compute` from now on wait for what is queued on `stream`.
void PrefillStream::end_stream(const Event & done, ggml_backend_t stream, ggml_backend_t compute) const {
    if (done) {
        ggml_backend_event_record(done.get(), stream);
        ggml_backend_event_wait(compute, done.get());
    } else {
        ggml_backend_synchronize(stream);
    }
}

void PrefillStream::end_upload(Place & place) {
    for (const Event * done : { &place.uploaded, &place.copied }) {
        if (*done) {
            ggml_backend_event_synchronize(done->get());
        }
    }
    tiers_.tables().release_held(place.layer, place.held);
    place.held.clear();
    place.reads.release();
}

void PrefillStream::record_computed(Place & place, ggml_backend_t compute) {
    place.was_used = true;
    place.user = compute;
    if (place.computed) {
        ggml_backend_event_record(place.computed.get(), compute);
    } else {
        ggml_backend_synchronize(compute);
    }
}

void PrefillStream::forget(ggml_backend_t compute) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (Place & place : places_) {
        if (place.user == compute) {
            if (place.was_used && place.computed) {
                ggml_backend_event_synchronize(place.computed.get());
            }
            place.was_used = false;
            place.user = nullptr;
        }
    }
}

} // namespace expertier
