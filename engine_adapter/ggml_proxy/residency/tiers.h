// A model's tiers as the proxy sees them: the slot tensors over the slab, and look-ups through the compiled policy.
#pragma once

#include "abi/abi.h"
#include "backend/device_memory.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "residency/counters.h"
#include "residency/pool_copies.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace expertier {

struct ProxyDevice;

struct MatrixRef {
    int layer = -1;
    int matrix = -1;
};

class ComputeRegion;
class DeviceLookup;
class PrefetchEvents;
class Predictor;
class PrefillStream;
class Tiers;

// Slots of one layer that are pinned while this lives, and the host copies that queued fills of them read.
class PinnedSlots {
  public:
    enum class Bytes {
        there,
        queued,      // behind what else is queued on one stream: no other stream may find them before that is done
        zero_filled, // some hold zeros: they are not to be found by anyone else at all
    };

    PinnedSlots() = default;
    PinnedSlots(Tiers & tiers, int layer, std::vector<int32_t> && slots, Bytes bytes, HostReads && reads = {})
        : tiers_(&tiers), layer_(layer), bytes_(bytes), slots_(std::move(slots)), reads_(std::move(reads)) {}
    ~PinnedSlots() { release(); }
    PinnedSlots(PinnedSlots && other) noexcept { *this = std::move(other); }
    PinnedSlots & operator=(PinnedSlots && other) noexcept {
        release();
        tiers_ = other.tiers_;
        layer_ = other.layer_;
        bytes_ = other.bytes_;
        slots_ = std::move(other.slots_);
        reads_ = std::move(other.reads_);
        other.tiers_ = nullptr;
        return *this;
    }

    explicit operator bool() const { return tiers_ != nullptr; }
    // In the order of the experts that were acquired.
    const std::vector<int32_t> & slots() const { return slots_; }
    // To be called once nothing that is queued reads the slots any more.
    void release();

  private:
    Tiers * tiers_ = nullptr;
    int layer_ = -1;
    Bytes bytes_ = Bytes::there;
    std::vector<int32_t> slots_;
    HostReads reads_;
};

class Tiers {
  public:
    // Copies the binding; throws std::runtime_error when it cannot be used on `device`.
    Tiers(const expertier_binding & binding, ProxyDevice & device);
    ~Tiers();
    Tiers(const Tiers &) = delete;
    Tiers & operator=(const Tiers &) = delete;

    // For whoever holds the layers' locks by itself.
    const expertier_policy & policy() const { return policy_; }
    const int64_t * directory() const { return directory_; }
    void * locks() const { return locks_; }

    int n_layers() const { return (int) layers_.size(); }
    int n_slots(int layer) const { return layers_[layer].n_slots; }
    int n_experts(int layer) const { return layers_[layer].n_experts; }
    ggml_tensor * slots(MatrixRef ref) const { return layers_[ref.layer].slots[ref.matrix]; }

    // Finds the matrix that the engine's tensor stands for, and checks type, shape and expert stride against it.
    bool find(const ggml_tensor * tensor, MatrixRef & ref);

    // Why a tensor in an expert buffer is refused that stands for no matrix.
    static std::string why_unknown(const ggml_tensor * tensor);

    bool has_matrix(const char * name) const;

    // What expert tensors of these tiers are placed in.
    ggml_backend_buffer_type_t buffer_type() const;

    // Counts the engine's tensors that stand for a matrix: +1 when one is made, -1 when it is freed.
    void place(MatrixRef ref, int change);
    // The first matrix that has no tensor in our buffers though its layer or a later one has; empty: there is none.
    // Layers at the end may have none at all: engines leave out the ones that only predict further tokens.
    std::string find_unplaced();

    // Makes `experts` (distinct, at most n_slots) resident for what is queued on `stream` from now on, and pins their
    // slots; fills misses. Empty after an error, which take_error() then tells.
    PinnedSlots acquire(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts);
    // Whether every expert of the layer is in the slot of its own number, and stays there: ids are slot ids then.
    bool is_fully_resident(int layer);
    // Pins the slots of those of `experts` that are resident, which is no use of them; -1 for the others.
    std::vector<int32_t> pin_ready(int layer, const std::vector<int32_t> & experts);
    void release_held(int layer, std::vector<int32_t> & slots); // as pin_ready returned them
    // Has Python copy `experts` into a streamed layer that begins at `streamed`; false after an error.
    bool load(int layer, const std::vector<int32_t> & experts, void * streamed);
    // Has Python copy `n_bytes` of a matrix, from byte `offset` of its experts on, to `out`; false where that failed.
    bool read(MatrixRef ref, uint64_t offset, uint64_t n_bytes, void * out);
    // The layers that pass by in large batches; null when they are not to.
    PrefillStream * prefill_stream() const { return prefill_stream_.get(); }
    // Looks up ids on the device; null when there is none. Throws std::runtime_error when it does not work.
    DeviceLookup * device_lookup() const { return device_lookup_.get(); }
    // Empty, or a line for each part that was asked for and does not work: its name, a tab, and why.
    std::string open_device_lookup(const expertier_device_lookup & driver);
    // Predicts what the next look-ups will ask for; null when there is none.
    Predictor * predictor() const { return predictor_.get(); }
    const PrefetchEvents & prefetch_events() const { return *prefetch_events_; }
    int32_t & device_table_version(int layer) {
        return layers_[layer].device_table_version;
    } // of the table on the device
    bool serves_fills() const { return fills_ == EXPERTIER_FILLS_SERVED; }
    int32_t stream_tokens() const { return stream_tokens_; }
    HostCopies & host_copies() { return host_copies_; }
    const std::vector<expertier_copy> & copies(int layer) const { return layers_[layer].copies; }
    int64_t expert_bytes(int layer) const; // of one, in all matrices
    // A piece of a slot's bytes.
    ggml_tensor slot_piece(int layer, int32_t slot, const expertier_copy & copy) const;
    // Reorders `experts` so that the resident ones come first: passes then evict as little as they can.
    void resident_first(int layer, std::vector<int32_t> & experts);

    // Changes whenever the slots lie elsewhere.
    int epoch() const { return epoch_; }
    // Has Python move the boundary (expertier_move) and takes over where the slots lie then; false and `failure` set
    // after an error. With no graph running.
    bool move(const expertier_compute & compute, uint64_t compute_bytes, std::string & failure);
    bool wants_other_slots(const expertier_compute & compute); // asks Python (expertier_look)
    std::shared_ptr<ComputeRegion> new_compute_region(const expertier_compute & compute);
    void count_misses_for(std::shared_ptr<ComputeRegion> region) { region_ = std::move(region); }
    void note_missed(int layer, int64_t n_experts);

    // Returns once no fill runs that began before.
    void set_fills(expertier_fills fills);

    // Errors are kept for the calling thread: the engine computes a batch on the thread that asked for it.
    static void fail(const std::string & message);
    static std::string take_error();

    Counters counters;

  private:
    friend class PinnedSlots;
    int32_t begin(int layer, const std::vector<int32_t> & experts, std::vector<int32_t> & slots,
                  std::vector<int32_t> & miss_index);
    void release(int layer, const std::vector<int32_t> & slots, PinnedSlots::Bytes bytes);

    enum class Filled { no, yes, zeros };
    // Allocated before slots are chosen: with slots pinned, nothing may fail for want of memory.
    struct FillRoom {
        explicit FillRoom(size_t n) : evicted(n) {
            experts.reserve(n);
            slots.reserve(n);
        }
        std::vector<int32_t> experts, slots; // that the host pool has no copies of
        std::vector<int32_t> evicted;
    };
    Filled fill(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts,
                const std::vector<int32_t> & slots, HostReads & reads, FillRoom & room);
    bool fill_from_python(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots);
    expertier_fills wait_while_filling_zeros() const;
    bool fills_with_zeros(int layer);

    struct Layer {
        int32_t n_experts = 0;
        int32_t n_slots = 0;
        std::vector<std::string> names;
        std::vector<int64_t> expert_bytes;
        std::vector<expertier_copy> copies;
        std::atomic<bool> is_fully_resident{ false };
        std::atomic<int64_t> zero_fill_graph{ -1 }; // whose misses in this layer are zeros; below 0: the next one's
        int32_t device_table_version = -1;
        std::vector<int> placed;          // the engine's tensors of each matrix
        std::vector<ggml_tensor *> slots; // one 3-d tensor a matrix, over all slots of the layer
    };

    void take_layout(const expertier_binding & binding);

    const int64_t * directory_;
    void * locks_;
    expertier_policy policy_;
    expertier_fill fill_;
    expertier_load load_;
    expertier_read read_;
    void * fill_context_;
    HostCopies host_copies_;
    ProxyDevice & device_;
    int32_t sees_all_;
    int32_t stream_tokens_;

    std::atomic<expertier_fills> fills_{ EXPERTIER_FILLS_SERVED };
    std::atomic<int32_t> fills_running_{ 0 };

    std::deque<Layer> layers_; // they do not move
    std::mutex placed_mutex_;  // guards `placed` of all layers

    struct FreeContext {
        void operator()(ggml_context * context) const { ggml_free(context); }
    };
    std::unique_ptr<ggml_context, FreeContext> context_;
    Buffer wrapped_slab_; // where the slab is host memory
    ggml_backend_buffer_t slab_ = nullptr;
    void * slab_base_;
    std::unique_ptr<PrefillStream> prefill_stream_;
    std::unique_ptr<DeviceLookup> device_lookup_;
    std::shared_ptr<ComputeRegion> region_;
    std::atomic<int> epoch_{ 0 };
    std::unique_ptr<PrefetchEvents> prefetch_events_;
    std::unique_ptr<Predictor> predictor_;
};

} // namespace expertier
