#include "lookup/device_lookup.h"

#include "lookup/captured.h"
#include "ggml-backend-impl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

namespace expertier {

namespace {

// Words of a mailbox, as in hip/kernels/device_lookup.cu. In words that the device writes, the value is the low half
// and the ticket's low half is the high one.
constexpr int answered = 0, go = 1, late = 2, missing = 3, rows = 8;
constexpr size_t mailbox_words = 128;
constexpr uint32_t below = 0xffff;

constexpr int most_experts = 0xfffe; // 0xffff stands for every id out of range

// As in hip/kernels/moves.cu.
constexpr uint32_t rows_by_value = 64, chunk_bytes = 16 << 10;
struct CopyRows {
    CopyRow row[rows_by_value];
};

constexpr unsigned threads_that_save = 256, threads_that_copy = 256; // the engine's stream waits for both

constexpr uint32_t default_spin_limit = 500'000; // reads of host memory, about a microsecond each

constexpr auto trial_limit = std::chrono::seconds(5);

uint32_t load(const uint32_t * word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(uint32_t * word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

} // namespace

DeviceLookup::DeviceLookup(const expertier_device_lookup & driver, ggml_backend_dev_t device,
                           const std::vector<int> & n_experts)
    : driver_(driver), spin_limit_(default_spin_limit), n_rows_(n_experts.size(), 0) {
    size_t n = 0;
    for (int experts : n_experts) {
        if (experts > most_experts) {
            throw std::runtime_error("a layer has " + std::to_string(experts) +
                                     " experts, more than it can tell apart");
        }
        first_.push_back(n);
        tables_.emplace_back(experts, -1);
        n += experts;
    }
    n_table_words_ = n;
    device_tables_ = new_device_buffer(device, (n + 1) * sizeof(int32_t)); // the last word: the graph that gave up
    host_tables_ = new_pinned_buffer(device, n * sizeof(int32_t));
    mailboxes_ = new_pinned_buffer(device, n_experts.size() * mailbox_words * sizeof(uint32_t));
    const size_t launch_param_bytes =
        (n_experts.size() + 1) * n_launch_params * sizeof(uint32_t); // the graph's number comes first
    device_launch_params_ = new_device_buffer(device, launch_param_bytes);
    host_launch_params_ = new_pinned_buffer(device, launch_param_bytes);
    uploads_.reset(ggml_backend_dev_init(device, nullptr));
    before_.reset(ggml_backend_event_new(device));
    after_.reset(ggml_backend_event_new(device));
    if (!device_tables_ || !device_launch_params_ || !uploads_ || !before_ || !after_) {
        throw std::runtime_error("the device gave no memory, stream or event for it");
    }
    ggml_backend_buffer_clear(device_tables_.get(), 0);
    try_out(device, false);
    for (size_t layer = 0; layer < tables_.size(); layer++) {
        upload_table((int) layer);
    }
    ggml_backend_synchronize(uploads_.get());
    spin_limit_ = driver.spin_limit ? driver.spin_limit : default_spin_limit;
}

uint32_t * DeviceLookup::mailbox(int layer) const {
    return static_cast<uint32_t *>(ggml_backend_buffer_get_base(mailboxes_.get())) + layer * mailbox_words;
}

void DeviceLookup::begin_graph() {
    graph_ += 1;
    host_launch_params()[0] = graph_;
}

uint64_t DeviceLookup::device_launch_params(int layer) const {
    const auto base = reinterpret_cast<uint64_t>(ggml_backend_buffer_get_base(device_launch_params_.get()));
    return base + (layer + 1) * n_launch_params * sizeof(uint32_t);
}

void DeviceLookup::expect(int layer, uint32_t n_rows) {
    n_rows_[layer] = n_rows;
    const uint32_t unlike = ~(graph_ << 16); // a mark that this graph's look-up does not write
    mailbox(layer)[missing] = unlike;
    std::fill_n(mailbox(layer) + rows, n_rows, unlike);
}

bool DeviceLookup::send_launch_params(ggml_backend_t compute, const std::vector<CopyRow> & rows) {
    rows_.assign(1, { device_launch_params(-1), reinterpret_cast<uint64_t>(host_launch_params()),
                      ggml_backend_buffer_get_size(host_launch_params_.get()) });
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    if (!wait_for(compute)) {
        return false;
    }
    for (size_t first = 0; first < rows_.size(); first += rows_by_value) {
        if (!launch_copies(&rows_[first], (uint32_t) std::min<size_t>(rows_.size() - first, rows_by_value))) {
            return false;
        }
    }
    return make_wait(compute);
}

bool DeviceLookup::queue(ggml_backend_t compute, int layer, const ggml_tensor * ids, ggml_tensor * slots,
                         const SavedRows & saved) {
    const uint32_t n_rows = (uint32_t) (ids->ne[0] * ids->ne[1]);
    return wait_for(compute) && launch(layer, ids->data, ids->nb, (uint32_t) ids->ne[0], n_rows, slots->data, saved) &&
           make_wait(compute);
}

bool DeviceLookup::wait_for(ggml_backend_t compute) {
    ggml_backend_event_record(before_.get(), compute);
    return driver_.stream_wait(driver_.stream, before_->context, 0) == 0;
}

bool DeviceLookup::make_wait(ggml_backend_t compute) {
    if (driver_.event_record(after_->context, driver_.stream) != 0) {
        return false;
    }
    ggml_backend_event_wait(compute, after_.get());
    return true;
}

bool DeviceLookup::launch_copies(const CopyRow * rows, uint32_t n) {
    CopyRows given = {};
    std::copy_n(rows, n, given.row);
    const uint64_t longest = std::max_element(rows, rows + n, [](const CopyRow & a, const CopyRow & b) {
                                 return a.n_bytes < b.n_bytes;
                             })->n_bytes;
    uint32_t chunk = chunk_bytes;
    void * arguments[] = { &given, &n, &chunk };
    return driver_.launch(driver_.copy, (uint32_t) ((longest + chunk - 1) / chunk), n, 1, threads_that_copy, 1, 1, 0,
                          driver_.stream, arguments, nullptr) == 0;
}

bool DeviceLookup::launch(int layer, const void * ids, const size_t * nb, uint32_t n_used, uint32_t n_rows,
                          void * slots, const SavedRows & saved) {
    uint64_t ids_address = reinterpret_cast<uint64_t>(ids);
    uint64_t column_bytes = nb[0], row_bytes = nb[1];
    uint64_t table_address = reinterpret_cast<uint64_t>(device_table(layer));
    uint32_t n_experts = (uint32_t) tables_[layer].size();
    uint64_t slots_address = reinterpret_cast<uint64_t>(slots);
    uint64_t mailbox_address = reinterpret_cast<uint64_t>(mailbox(layer));
    uint64_t launch_params = device_number();
    uint32_t until = spin_limit_;
    SavedRows rows_given = saved;
    uint64_t gave_up = reinterpret_cast<uint64_t>(device_table(0) + n_table_words_);
    uint64_t hidden = reinterpret_cast<uint64_t>(rows_given.rows),
             saved_address = reinterpret_cast<uint64_t>(rows_given.copy);
    void * arguments[] = { &ids_address,
                           &column_bytes,
                           &row_bytes,
                           &n_used,
                           &n_rows,
                           &table_address,
                           &n_experts,
                           &slots_address,
                           &mailbox_address,
                           &launch_params,
                           &until,
                           &hidden,
                           &rows_given.row_bytes,
                           &rows_given.n_hidden,
                           &rows_given.n_tokens,
                           &saved_address,
                           &gave_up };
    const unsigned n_threads = rows_given.n_tokens ? threads_that_save : (unsigned) max_rows;
    return driver_.launch(driver_.function, 1, 1, 1, n_threads, 1, 1, 0, driver_.stream, arguments, nullptr) == 0;
}

bool DeviceLookup::has_arrived(int layer) const {
    const uint32_t * words = mailbox(layer);
    const uint32_t mark = graph_ << 16;
    const auto came = [mark](uint32_t word) { return (word & ~below) == mark; };
    if (!came(load(words + missing))) {
        return false;
    }
    for (uint32_t row = 0; row < n_rows_[layer]; row++) {
        if (!came(load(words + rows + row))) {
            return false;
        }
    }
    return true;
}

int DeviceLookup::n_missing(int layer) const { return (int) (load(mailbox(layer) + missing) & below); }

void DeviceLookup::experts(int layer, std::vector<int32_t> & experts) const {
    experts.resize(n_rows_[layer]);
    for (uint32_t row = 0; row < n_rows_[layer]; row++) {
        experts[row] = (int32_t) (load(mailbox(layer) + rows + row) & below);
    }
}

bool DeviceLookup::answer(int layer, bool is_go) {
    store(mailbox(layer) + go, is_go);
    store(mailbox(layer) + answered, graph_);
    // The kernel writes `late` before it goes on, and the host answers before it reads `late`: at least one of the two
    // sees the other's word.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return load(mailbox(layer) + late) != graph_;
}

void DeviceLookup::upload_table(int layer) {
    const size_t n_bytes = tables_[layer].size() * sizeof(int32_t);
    memcpy(host_table(layer), tables_[layer].data(), n_bytes);
    ggml_tensor target = bytes_at(device_tables_.get(), device_table(layer), n_bytes);
    ggml_backend_tensor_set_async(uploads_.get(), &target, host_table(layer), 0, n_bytes);
}

void DeviceLookup::upload_entry(int layer, int32_t expert) {
    store(reinterpret_cast<uint32_t *>(host_table(layer) + expert), (uint32_t) tables_[layer][expert]);
    ggml_tensor target = bytes_at(device_tables_.get(), device_table(layer) + expert, sizeof(int32_t));
    ggml_backend_tensor_set_async(uploads_.get(), &target, host_table(layer) + expert, 0, sizeof(int32_t));
}

std::string DeviceLookup::try_capture(ggml_backend_dev_t device) {
    if (driver_.capture_begin == nullptr) {
        return {};
    }
    const uint32_t spin_limit = std::exchange(spin_limit_, default_spin_limit);
    std::string problem;
    try {
        try_out(device, true);
    } catch (const std::runtime_error & found) {
        driver_.capture_begin = nullptr;
        problem = found.what();
    }
    spin_limit_ = spin_limit;
    return problem;
}

// One row asks for expert 0, which is missing. The answer puts the expert into slot 7; a captured graph is launched a
// second time, and the answer then says slot 8.
void DeviceLookup::try_out(ggml_backend_dev_t device, bool captured) {
    std::unique_ptr<ggml_backend, FreeBackend> compute(ggml_backend_dev_init(device, nullptr));
    Buffer memory = new_device_buffer(device, 256); // ids at 0, slots at 128
    if (!compute || !memory) {
        throw std::runtime_error("the device gave no memory or stream for a trial");
    }
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(memory.get()));
    ggml_tensor ids = bytes_at(memory.get(), base, sizeof(int32_t));
    ggml_tensor slots = bytes_at(memory.get(), base + 128, sizeof(int32_t));
    ids.ne[0] = 1;
    ids.nb[0] = ids.nb[1] = sizeof(int32_t);
    CapturedGraph graph;
    for (int32_t wanted = 7; wanted < (captured ? 9 : 8); wanted++) {
        upload_table(0);
        ggml_backend_synchronize(uploads_.get());
        begin_graph();
        expect(0, 1);
        const auto queue = [&] {
            return send_launch_params(compute.get()) && this->queue(compute.get(), 0, &ids, &slots);
        };
        if (captured
                ? !(graph.is(1) || graph.capture(*this, compute.get(), 1, queue)) || !graph.launch(*this, compute.get())
                : !queue()) {
            throw std::runtime_error(captured ? "the driver refused to capture it" : "the driver refused to queue it");
        }
        const auto deadline = std::chrono::steady_clock::now() + trial_limit;
        while (!has_arrived(0) && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::yield();
        }
        std::vector<int32_t> asked;
        const bool came = has_arrived(0) && n_missing(0) == 1 && (experts(0, asked), asked[0] == 0);
        tables_[0][0] = wanted;
        upload_table(0);
        ggml_backend_synchronize(uploads_.get());
        const bool in_time = answer(0, came);
        int32_t slot = -1;
        ggml_backend_tensor_get_async(compute.get(), &slots, &slot, 0, sizeof(slot));
        ggml_backend_synchronize(compute.get());
        tables_[0][0] = -1;
        if (!came || slot != wanted || !in_time) {
            throw std::runtime_error("a trial of it gave slot " + std::to_string(slot) + " instead of " +
                                     std::to_string(wanted));
        }
    }
    upload_table(0);
    ggml_backend_synchronize(uploads_.get());
}

} // namespace expertier
