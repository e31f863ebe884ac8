#include "tiers.h"

#include "layer_lock.h"

#include <chrono>
#include <stdexcept>

namespace expertier {

namespace {

// A context waits this long for slots that others hold before it gives up with an error.
constexpr int wait_limit_s = 60;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace

Tiers::Tiers(const expertier_binding & binding, ggml_backend_dev_t inner)
    : directory_(binding.directory), locks_(binding.locks), policy_(binding.policy), fill_(binding.fill),
      fill_context_(binding.fill_context) {
    slab_ = ggml_backend_dev_buffer_from_host_ptr(inner, binding.slab_base, binding.slab_bytes, binding.slab_bytes);
    if (slab_ == nullptr) {
        throw std::runtime_error(std::string("device ") + ggml_backend_dev_name(inner) +
                                 " cannot use the slab's memory: it takes no host pointers");
    }
    ggml_backend_buffer_set_usage(slab_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    size_t n_matrices = 0;
    for (int i = 0; i < binding.n_layers; i++) {
        n_matrices += binding.layers[i].n_matrices;
    }
    context_ = ggml_init({ (n_matrices + 1) * ggml_tensor_overhead(), nullptr, true });

    layers_.resize(binding.n_layers);
    for (int i = 0; i < binding.n_layers; i++) {
        const expertier_layer & from  = binding.layers[i];
        Layer &                 layer = layers_[i];
        layer.n_experts               = from.n_experts;
        layer.n_slots                 = from.n_slots;
        for (int j = 0; j < from.n_matrices; j++) {
            const expertier_matrix & matrix = from.matrices[j];
            ggml_tensor * tensor =
                ggml_new_tensor_3d(context_, (ggml_type) matrix.type, matrix.ne0, matrix.ne1, from.n_slots);
            layer.names.emplace_back(matrix.name);
            layer.expert_bytes.push_back(tensor->nb[2]);
            tensor->nb[2]  = matrix.stride;
            tensor->nb[3]  = matrix.stride * from.n_slots;
            tensor->data   = static_cast<char *>(binding.slab_base) + matrix.offset;
            tensor->buffer = slab_;
            ggml_format_name(tensor, "%s.slots", matrix.name);
            layer.slots.push_back(tensor);
        }
    }
}

Tiers::~Tiers() {
    ggml_backend_buffer_free(slab_);
    ggml_free(context_);
}

bool Tiers::find(const ggml_tensor * tensor, MatrixRef & ref) {
    for (size_t i = 0; i < layers_.size(); i++) {
        const Layer & layer = layers_[i];
        for (size_t j = 0; j < layer.names.size(); j++) {
            if (layer.names[j] != tensor->name) {
                continue;
            }
            const ggml_tensor * slots = layer.slots[j];
            if (tensor->type != slots->type || tensor->ne[0] != slots->ne[0] || tensor->ne[1] != slots->ne[1] ||
                tensor->ne[2] != layer.n_experts || (int64_t) tensor->nb[2] != layer.expert_bytes[j]) {
                fail("the engine's tensor " + layer.names[j] + " has another type or shape than the GGUF");
                return false;
            }
            ref = { (int) i, (int) j };
            return true;
        }
    }
    fail(std::string("tensor ") + tensor->name + " is not an expert matrix of this model's table");
    return false;
}

bool Tiers::acquire(int layer, const std::vector<int32_t> & experts, std::vector<int32_t> & slots) {
    const int32_t        n = (int32_t) experts.size();
    std::vector<int32_t> miss_index(n);
    slots.resize(n);

    int32_t n_misses = 0;
    {
        LayerLock lock(locks_, layer);
        for (;;) {
            const int64_t start = now_ns();
            n_misses = policy_.begin(directory_, layer, experts.data(), n, slots.data(), miss_index.data());
            counters.lookup_ns += now_ns() - start;
            counters.lookups += 1;
            if (n_misses != EXPERTIER_BUSY) {
                break;
            }
            if (!lock.wait(wait_limit_s)) {
                fail("layer " + std::to_string(layer) + ": its slots stayed pinned or filling for " +
                     std::to_string(wait_limit_s) + " s; release leases before running the engine");
                return false;
            }
        }
    }
    if (n_misses < 0) {
        fail("layer " + std::to_string(layer) + ": the router chose an expert outside 0.." +
             std::to_string(layers_[layer].n_experts - 1) + " (policy status " + std::to_string(n_misses) + ")");
        return false;
    }
    if (n_misses == 0) {
        return true;
    }

    std::vector<int32_t> missing(n_misses), targets(n_misses);
    for (int32_t i = 0; i < n_misses; i++) {
        missing[i] = experts[miss_index[i]];
        targets[i] = slots[miss_index[i]];
    }
    const int64_t start = now_ns();
    const int32_t error = fill_(fill_context_, layer, n_misses, missing.data(), targets.data());
    counters.fill_ns += now_ns() - start;
    counters.fills += 1;

    LayerLock lock(locks_, layer);
    if (error) {
        policy_.abort(directory_, layer, slots.data(), n);
    } else {
        policy_.complete(directory_, layer, slots.data(), n);
    }
    lock.notify_all();
    if (error) {
        fail("layer " + std::to_string(layer) + ": expert bytes could not be read");
    }
    return !error;
}

void Tiers::release(int layer, const std::vector<int32_t> & slots) {
    LayerLock lock(locks_, layer);
    policy_.release(directory_, layer, slots.data(), (int32_t) slots.size());
    lock.notify_all();
}

void Tiers::resident_first(int layer, std::vector<int32_t> & experts) {
    LayerLock lock(locks_, layer);
    policy_.resident_first(directory_, layer, experts.data(), (int32_t) experts.size());
}

void Tiers::fail(const std::string & message) {
    std::lock_guard<std::mutex> guard(error_mutex_);
    error_ = message;
}

std::string Tiers::take_error() {
    std::lock_guard<std::mutex> guard(error_mutex_);
    std::string                 error;
    error.swap(error_);
    return error;
}

} // namespace expertier
