#include "residency/tiers.h"

#include "prefetch/run.h"
#include "abi/block_size.h"
#include "backend/device.h"
#include "abi/embedded.h"
#include "lookup/device_lookup.h"
#include "ggml-backend-impl.h"
#include "residency/layer_lock.h"
#include "prefetch/predictor.h"
#include "graph/prefill_stream.h"

#include <algorithm>
#include <numeric>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace expertier {

namespace {

// A call waits this long for slots that others hold before it gives up with an error.
constexpr int wait_limit_s = 60;

// A graph that comes too early, while a load is still to end, waits this long.
constexpr auto early_limit = std::chrono::seconds(5);
constexpr auto poll_time = std::chrono::milliseconds(1);

thread_local std::string last_error;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Throws when this build of ggml has no such type, or another of that number than the table knows.
void require_type(const expertier_matrix & matrix) {
    int64_t elements, n_bytes;
    if (!block_size(matrix.type, &elements, &n_bytes)) {
        throw std::runtime_error(std::string("this llama.cpp has no ggml type ") + std::to_string(matrix.type) +
                                 ", which " + matrix.name + " is of: use a newer one");
    }
    const int64_t expert_bytes = matrix.ne0 / elements * n_bytes * matrix.ne1;
    if (matrix.ne0 % elements != 0 || expert_bytes != (int64_t) matrix.expert_bytes) {
        throw std::runtime_error(std::string("an expert of ") + matrix.name + " takes " +
                                 std::to_string(matrix.expert_bytes) + " bytes by the gguf package and " +
                                 std::to_string(expert_bytes) +
                                 " by this llama.cpp: install the gguf package that belongs to it");
    }
}

// Throws when `inner` cannot multiply by the slots of a matrix: its type, or a stride that leaves gaps.
void require_support(ggml_backend_dev_t inner, ggml_tensor * slots) {
    std::unique_ptr<ggml_context, decltype(&ggml_free)> scope(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }),
                                                              &ggml_free);
    ggml_tensor * rows = ggml_new_tensor_3d(scope.get(), GGML_TYPE_F32, slots->ne[0], 1, 1);
    ggml_tensor * ids = ggml_new_tensor_2d(scope.get(), GGML_TYPE_I32, 1, 1);
    ggml_tensor * product = ggml_mul_mat_id(scope.get(), slots, rows, ids);
    if (!ggml_backend_dev_supports_op(inner, product)) {
        throw std::runtime_error(std::string("it cannot run MUL_MAT_ID on ") + slots->name + " of type " +
                                 ggml_type_name(slots->type));
    }
}

} // namespace

Tiers::Tiers(const expertier_binding & binding, ProxyDevice & device)
    : directory_(binding.directory), locks_(binding.locks), policy_(binding.policy), fill_(binding.fill),
      load_(binding.load), read_(binding.read), fill_context_(binding.fill_context), host_copies_(binding.host_copies),
      device_(device), sees_all_(binding.sees_all), stream_tokens_(binding.stream_tokens),
      slab_base_(binding.slab_base) {
    ggml_backend_dev_t inner = device.inner;
    const DevicePlace place = find_device_place(binding.slab_base);
    slab_ = place.buffer;
    if (slab_ != nullptr) {
        slab_base_ = place.data;
    } else {
        if (inner->iface.buffer_from_host_ptr == nullptr) {
            throw std::runtime_error("it takes no host pointers, so it cannot use a slab in host memory");
        }
        wrapped_slab_.reset(
            ggml_backend_dev_buffer_from_host_ptr(inner, binding.slab_base, binding.slab_bytes, binding.slab_bytes));
        if (!wrapped_slab_) {
            throw std::runtime_error("it refused the slab's memory");
        }
        ggml_backend_buffer_set_usage(wrapped_slab_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        slab_ = wrapped_slab_.get();
    }

    size_t n_matrices = 0;
    for (int i = 0; i < binding.n_layers; i++) {
        n_matrices += binding.layers[i].n_matrices;
    }
    context_.reset(ggml_init({ (n_matrices + 1) * ggml_tensor_overhead(), nullptr, true }));

    for (int i = 0; i < binding.n_layers; i++) {
        const expertier_layer & from = binding.layers[i];
        Layer & layer = layers_.emplace_back();
        layer.n_experts = from.n_experts;
        layer.n_slots = from.n_slots;
        layer.copies.assign(from.copies, from.copies + from.n_copies);
        for (int j = 0; j < from.n_matrices; j++) {
            const expertier_matrix & matrix = from.matrices[j];
            require_type(matrix);
            ggml_tensor * tensor =
                ggml_new_tensor_3d(context_.get(), (ggml_type) matrix.type, matrix.ne0, matrix.ne1, from.n_slots);
            layer.names.emplace_back(matrix.name);
            layer.expert_bytes.push_back(tensor->nb[2]);
            tensor->nb[2] = matrix.stride;
            tensor->nb[3] = matrix.stride * from.n_slots;
            tensor->data = static_cast<char *>(slab_base_) + matrix.offset;
            tensor->buffer = slab_;
            ggml_format_name(tensor, "%s.slots", matrix.name);
            layer.slots.push_back(tensor);
            layer.placed.push_back(0);
            require_support(inner, tensor);
        }
    }
    std::vector<int64_t> first;
    for (int i = 0; i < binding.n_layers; i++) {
        first.push_back(binding.layers[i].first_copy);
    }
    host_copies_.set_first(std::move(first));
    if (stream_tokens_ > 0) {
        prefill_stream_ = std::make_unique<PrefillStream>(*this, binding, inner);
    }
}

Tiers::~Tiers() = default;

std::string Tiers::open_device_lookup(const expertier_device_lookup & driver) {
    if (sees_all_) {
        throw std::runtime_error("every look-up is being recorded, on the host");
    }
    std::vector<int> n_experts;
    for (const Layer & layer : layers_) {
        n_experts.push_back(layer.n_experts);
    }
    device_lookup_ = std::make_unique<DeviceLookup>(driver, device_.inner, n_experts);
    std::string without;
    if (const std::string problem = device_lookup_->try_capture(device_.inner); !problem.empty()) {
        without += "capture\t" + problem + "\n";
    }
    if (driver.predict == nullptr || driver.layers_ahead <= 0) {
        return without;
    }
    try {
        prefetch_events_ = std::make_unique<PrefetchEvents>(device_.inner);
        predictor_ = std::make_unique<Predictor>(*device_lookup_, device_.inner, n_experts);
    } catch (const std::runtime_error & problem) { // look-ups work without predictions
        prefetch_events_.reset();
        without += std::string("prefetch\t") + problem.what() + "\n";
    }
    return without;
}

int64_t Tiers::expert_bytes(int layer) const {
    const std::vector<expertier_copy> & pieces = copies(layer);
    return std::accumulate(pieces.begin(), pieces.end(), (int64_t) 0,
                           [](int64_t sum, const expertier_copy & piece) { return sum + (int64_t) piece.n_bytes; });
}

ggml_tensor Tiers::slot_piece(int, int32_t slot, const expertier_copy & copy) const {
    return bytes_at(slab_, static_cast<char *>(slab_base_) + copy.offset + slot * copy.stride, copy.n_bytes);
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
    fail(why_unknown(tensor));
    return false;
}

std::string Tiers::why_unknown(const ggml_tensor * tensor) {
    const std::string name = tensor->name;
    return name.find(".lora_") != std::string::npos
               ? "tensor " + name +
                     " is of a LoRA adapter over experts, and the engine keeps an adapter where the weights "
                     "lie that it changes: experts in the tiers have no room for it there, so the adapter is not loaded; use one "
                     "without ffn_*_exps tensors, or merge it into the model"
               : "tensor " + name +
                     " was placed among experts in the tiers, and is not an expert matrix of a model that is "
                     "being loaded into them; open the model through expertier";
}

bool Tiers::has_matrix(const char * name) const {
    for (const Layer & layer : layers_) {
        if (std::find(layer.names.begin(), layer.names.end(), name) != layer.names.end()) {
            return true;
        }
    }
    return false;
}

ggml_backend_buffer_type_t Tiers::buffer_type() const { return &device_.experts; }

void Tiers::place(MatrixRef ref, int change) {
    std::lock_guard<std::mutex> guard(placed_mutex_);
    layers_[ref.layer].placed[ref.matrix] += change;
}

std::string Tiers::find_unplaced() {
    std::lock_guard<std::mutex> guard(placed_mutex_);
    std::string first;
    bool is_needed = false; // a later layer is in our buffers, or none is at all
    for (size_t i = layers_.size(); i-- > 0;) {
        const Layer & layer = layers_[i];
        for (size_t j = layer.names.size(); j-- > 0;) {
            is_needed = is_needed || layer.placed[j] > 0;
        }
        for (size_t j = layer.names.size(); j-- > 0 && (is_needed || i == 0);) {
            if (layer.placed[j] == 0) {
                first = layer.names[j];
            }
        }
    }
    return first;
}

PinnedSlots Tiers::acquire(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts) {
    const int32_t n = (int32_t) experts.size();
    std::vector<int32_t> slots(n), miss_index(n), missing(n), targets(n); // nothing may fail after `begin`
    HostReads reads(host_copies_, n);
    FillRoom room(n);

    const int32_t n_misses = begin(layer, experts, slots, miss_index);
    if (n_misses < 0) {
        return {};
    }
    if (n_misses > 0) {
        for (int32_t i = 0; i < n_misses; i++) {
            missing[i] = experts[miss_index[i]];
            targets[i] = slots[miss_index[i]];
        }
        missing.resize(n_misses);
        targets.resize(n_misses);
        note_missed(layer, n_misses);
        const Filled filled = fill(stream, layer, missing, targets, reads, room);
        if (filled == Filled::zeros) {
            return PinnedSlots(*this, layer, std::move(slots), PinnedSlots::Bytes::zero_filled);
        }
        if (!reads.empty() && filled == Filled::yes && device_.n_backends == 1) { // nobody waits for the slots now
            return PinnedSlots(*this, layer, std::move(slots), PinnedSlots::Bytes::queued, std::move(reads));
        }
        if (!reads.empty()) {
            ggml_backend_synchronize(stream); // another stream may read the slots, or overwrite them, right away
        }
        LayerLock lock(locks_, layer);
        const auto end = filled == Filled::yes ? policy_.complete : policy_.abort;
        if (end(directory_, layer, slots.data(), n) < 0) {
            fail("layer " + std::to_string(layer) + ": the residency tables refused the end of a fill");
        }
        lock.notify_all();
        if (filled == Filled::no) {
            fail("layer " + std::to_string(layer) + ": expert bytes could not be read");
            return {};
        }
    }
    return PinnedSlots(*this, layer, std::move(slots), PinnedSlots::Bytes::there, std::move(reads));
}

Tiers::Filled Tiers::fill(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts,
                          const std::vector<int32_t> & slots, HostReads & reads, FillRoom & room) {
    struct Running {
        std::atomic<int32_t> & count;
        explicit Running(std::atomic<int32_t> & n) : count(n) { count += 1; }
        ~Running() { count -= 1; }
    } running(fills_running_); // before the mode is looked at: set_fills() sets it first, then waits for this

    if (fills_with_zeros(layer)) {
        for (size_t i = 0; i < experts.size(); i++) {
            for (size_t j = 0; j < layers_[layer].slots.size(); j++) {
                ggml_tensor * matrix = layers_[layer].slots[j];
                ggml_backend_tensor_memset(matrix, 0, slots[i] * matrix->nb[2], layers_[layer].expert_bytes[j]);
            }
        }
        return Filled::zeros;
    }
    if (wait_while_filling_zeros() != EXPERTIER_FILLS_SERVED) {
        return Filled::no;
    }
    for (size_t i = 0; i < experts.size(); i++) {
        const char * copy = reads.take(layer, experts[i]);
        if (copy == nullptr) {
            room.experts.push_back(experts[i]);
            room.slots.push_back(slots[i]);
            continue;
        }
        for (const expertier_copy & piece : layers_[layer].copies) {
            ggml_tensor target = slot_piece(layer, slots[i], piece);
            ggml_backend_tensor_set_async(stream, &target, copy + piece.source, 0, piece.n_bytes);
        }
        counters.host_fills += 1;
    }
    if (!reads.empty()) {
        room.evicted.resize(slots.size());
        policy_.evicted_by(directory_, layer, slots.data(), (int32_t) slots.size(), room.evicted.data());
        host_copies_.touch(layer, room.evicted);
    }
    return room.experts.empty() || fill_from_python(layer, room.experts, room.slots) ? Filled::yes : Filled::no;
}

bool Tiers::fill_from_python(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots) {
    const int64_t start = now_ns();
    int32_t done = 0;
    fill_(fill_context_, layer, (int32_t) experts.size(), experts.data(), slots.data(), &done);
    counters.fill_ns += now_ns() - start;
    counters.fills += 1;
    return done == EXPERTIER_FILLED;
}

bool Tiers::load(int layer, const std::vector<int32_t> & experts, void * streamed) {
    const int64_t start = now_ns();
    int32_t done = 0;
    fills_running_ += 1;
    if (fills_ == EXPERTIER_FILLS_ZEROS) { // nobody reads what the graph computes
        done = EXPERTIER_FILLED;
    } else if (fills_ == EXPERTIER_FILLS_SERVED) {
        load_(fill_context_, layer, (int32_t) experts.size(), experts.data(), reinterpret_cast<uint64_t>(streamed),
              &done);
    }
    fills_running_ -= 1;
    counters.fill_ns += now_ns() - start;
    counters.fills += 1;
    if (done != EXPERTIER_FILLED) {
        fail("layer " + std::to_string(layer) + ": expert bytes could not be read");
    }
    return done == EXPERTIER_FILLED;
}

bool Tiers::read(MatrixRef ref, uint64_t offset, uint64_t n_bytes, void * out) {
    int32_t done = 0;
    fills_running_ += 1;
    if (read_ != nullptr && wait_while_filling_zeros() == EXPERTIER_FILLS_SERVED) {
        read_(fill_context_, ref.layer, ref.matrix, offset, n_bytes, out, &done);
    }
    fills_running_ -= 1;
    return done == EXPERTIER_FILLED;
}

bool Tiers::is_fully_resident(int layer) {
    Layer & self = layers_[layer];
    if (self.is_fully_resident) {
        return true;
    }
    if (sees_all_ || self.n_slots < self.n_experts) {
        return false;
    }
    LayerLock lock(locks_, layer);
    self.is_fully_resident = policy_.is_fully_resident(directory_, layer) == 1;
    return self.is_fully_resident;
}

std::vector<int32_t> Tiers::pin_ready(int layer, const std::vector<int32_t> & experts) {
    std::vector<int32_t> slots(experts.size(), -1);
    LayerLock lock(locks_, layer);
    if (policy_.pin_ready(directory_, layer, experts.data(), (int32_t) experts.size(), slots.data()) < 0) {
        slots.assign(experts.size(), -1); // nothing was pinned
    }
    return slots;
}

void Tiers::release_held(int layer, std::vector<int32_t> & slots) {
    slots.erase(std::remove(slots.begin(), slots.end(), -1), slots.end());
    release(layer, slots, PinnedSlots::Bytes::there);
}

// Layer by layer: of a graph that devices share, each piece between two sums is a graph here.
bool Tiers::fills_with_zeros(int layer) {
    int64_t first = -1;
    const int64_t now = counters.graphs;
    return fills_ == EXPERTIER_FILLS_ZEROS &&
           (layers_[layer].zero_fill_graph.compare_exchange_strong(first, now) || first == now);
}

expertier_fills Tiers::wait_while_filling_zeros() const {
    const auto deadline = std::chrono::steady_clock::now() + early_limit;
    while (fills_ == EXPERTIER_FILLS_ZEROS && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(poll_time);
    }
    return fills_;
}

void Tiers::set_fills(expertier_fills fills) {
    for (Layer & layer : layers_) {
        layer.zero_fill_graph = -1;
    }
    fills_ = fills;
    while (fills_running_ > 0) {
        std::this_thread::sleep_for(poll_time);
    }
}

int32_t Tiers::begin(int layer, const std::vector<int32_t> & experts, std::vector<int32_t> & slots,
                     std::vector<int32_t> & miss_index) {
    const std::string where = "layer " + std::to_string(layer);
    timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += wait_limit_s;

    LayerLock lock(locks_, layer);
    for (;;) {
        const int64_t start = now_ns();
        const int32_t status =
            policy_.begin(directory_, layer, experts.data(), (int32_t) experts.size(), slots.data(), miss_index.data());
        counters.lookup_ns += now_ns() - start;
        counters.lookups += 1;
        switch (status) {
        case EXPERTIER_BUSY:
            if (lock.wait_until(deadline)) {
                continue;
            }
            fail(where + ": others held its slots for " + std::to_string(wait_limit_s) +
                 " s; release leases before running the engine");
            return status;
        case EXPERTIER_TOO_MANY:
            fail(where + ": " + std::to_string(experts.size()) + " experts at once, but it has " +
                 std::to_string(layers_[layer].n_slots) + " slots");
            return status;
        case EXPERTIER_BAD_EXPERT:
            fail(where + ": an expert outside 0.." + std::to_string(layers_[layer].n_experts - 1));
            return status;
        case EXPERTIER_BAD_CALL:
            fail(where + ": the residency tables are of another version of expertier; restart the process");
            return status;
        default:
            return status;
        }
    }
}

void Tiers::release(int layer, const std::vector<int32_t> & slots, PinnedSlots::Bytes bytes) {
    LayerLock lock(locks_, layer);
    const int32_t n = (int32_t) slots.size();
    if (bytes == PinnedSlots::Bytes::queued && policy_.complete(directory_, layer, slots.data(), n) < 0) {
        fail("layer " + std::to_string(layer) + ": the residency tables refused the end of a fill");
    }
    const auto end = bytes == PinnedSlots::Bytes::zero_filled ? policy_.abort : policy_.release;
    if (end(directory_, layer, slots.data(), n) < 0) {
        fail("layer " + std::to_string(layer) + ": the residency tables refused the release of slots");
    }
    lock.notify_all();
}

void PinnedSlots::release() {
    if (tiers_) {
        tiers_->release(layer_, slots_, bytes_);
        tiers_ = nullptr;
    }
    reads_.release();
}

void Tiers::resident_first(int layer, std::vector<int32_t> & experts) {
    LayerLock lock(locks_, layer);
    policy_.resident_first(directory_, layer, experts.data(), (int32_t) experts.size());
}

void Tiers::fail(const std::string & message) {
    last_error = message;
    say_in_tool(message);
}

std::string Tiers::take_error() {
    std::string error;
    error.swap(last_error);
    return error;
}

} // namespace expertier
