#include "residency/misses.h"

#include "residency/errors.h"

#include <chrono>
#include <string>
#include <thread>

namespace expertier {

namespace {

// A graph that comes before a load has ended waits at most this long for the load's end.
constexpr auto early_limit = std::chrono::seconds(5);
constexpr auto poll_time = std::chrono::milliseconds(1);

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace

Misses::Misses(const expertier_binding & binding, SlotTensors & slots, const ResidencyTables & tables,
               HostCopies & host_copies, Counters & counters)
    : fill_(binding.fill), load_(binding.load), read_(binding.read), context_(binding.fill_context), slots_(slots),
      tables_(tables), host_copies_(host_copies), counters_(counters) {
    for (int i = 0; i < binding.n_layers; i++) {
        zero_fill_graphs_.emplace_back(-1);
    }
}

Misses::Filled Misses::fill(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts,
                            const std::vector<int32_t> & slots, HostReads & reads, FillRoom & room) {
    const Running running(*this);
    if (fills_with_zeros(layer)) {
        for (size_t i = 0; i < experts.size(); i++) {
            slots_.fill_with_zeros(layer, slots[i]);
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
        for (const expertier_copy & piece : slots_.copies(layer)) {
            ggml_tensor target = slots_.piece(slots[i], piece);
            ggml_backend_tensor_set_async(stream, &target, copy + piece.source, 0, piece.n_bytes);
        }
        counters_.host_fills += 1;
    }
    if (!reads.empty()) {
        room.evicted.resize(slots.size());
        tables_.policy().evicted_by(tables_.directory(), layer, slots.data(), (int32_t) slots.size(),
                                    room.evicted.data());
        host_copies_.touch(layer, room.evicted);
    }
    return room.experts.empty() || fill_from_python(layer, room.experts, room.slots) ? Filled::yes : Filled::no;
}

bool Misses::fill_from_python(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots) {
    const int64_t start = now_ns();
    int32_t done = 0;
    fill_(context_, layer, (int32_t) experts.size(), experts.data(), slots.data(), &done);
    counters_.fill_ns += now_ns() - start;
    counters_.fills += 1;
    return done == EXPERTIER_FILLED;
}

bool Misses::load(int layer, const std::vector<int32_t> & experts, void * streamed) {
    const int64_t start = now_ns();
    int32_t done = 0;
    {
        const Running running(*this);
        if (fills_ == EXPERTIER_FILLS_ZEROS) { // nobody uses the graph's results, so nothing is loaded
            done = EXPERTIER_FILLED;
        } else if (fills_ == EXPERTIER_FILLS_SERVED) {
            load_(context_, layer, (int32_t) experts.size(), experts.data(), reinterpret_cast<uint64_t>(streamed),
                  &done);
        }
    }
    counters_.fill_ns += now_ns() - start;
    counters_.fills += 1;
    if (done != EXPERTIER_FILLED) {
        set_error("layer " + std::to_string(layer) + ": expert bytes could not be read");
    }
    return done == EXPERTIER_FILLED;
}

bool Misses::read(MatrixRef ref, uint64_t offset, uint64_t n_bytes, void * out) {
    int32_t done = 0;
    const Running running(*this);
    if (read_ != nullptr && wait_while_filling_zeros() == EXPERTIER_FILLS_SERVED) {
        read_(context_, ref.layer, ref.matrix, offset, n_bytes, out, &done);
    }
    return done == EXPERTIER_FILLED;
}

// Whether a miss in `layer` gets zeros. Each layer remembers its own graph: when devices share a graph, each part of it
// between two sums is a graph to this device's proxy.
bool Misses::fills_with_zeros(int layer) {
    int64_t first = -1;
    const int64_t now = counters_.graphs;
    return fills_ == EXPERTIER_FILLS_ZEROS &&
           (zero_fill_graphs_[layer].compare_exchange_strong(first, now) || first == now);
}

expertier_fills Misses::wait_while_filling_zeros() const {
    const auto deadline = std::chrono::steady_clock::now() + early_limit;
    while (fills_ == EXPERTIER_FILLS_ZEROS && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(poll_time);
    }
    return fills_;
}

void Misses::set_fills(expertier_fills fills) {
    for (std::atomic<int64_t> & graph : zero_fill_graphs_) {
        graph = -1;
    }
    fills_ = fills;
    while (fills_running_ > 0) {
        std::this_thread::sleep_for(poll_time);
    }
}

} // namespace expertier
