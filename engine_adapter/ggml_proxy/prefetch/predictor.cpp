#include "prefetch/predictor.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace expertier {

namespace {

// Words of a mailbox, and limits, as in hip/kernels/predict.cu.
constexpr int posted = 0, number = 1, first_chosen = 2, first_predicted = 16;
constexpr int first_candidate = 1; // in a layer's launch parameters, behind their number
static_assert(first_candidate + Predictor::n_candidates <= (int) DeviceLookup::n_launch_params);
constexpr size_t mailbox_words = 128;
constexpr int64_t max_experts = 512, max_scores = 4096;

// So many experts with the next best scores are not replaced either.
constexpr uint32_t n_spared = 2;
// Of one layer no more bytes than that are prefetched, but always one expert: more would hardly arrive while a layer
// computes.
constexpr int64_t bytes_ahead = 6 << 20;

constexpr unsigned n_threads = 256, n_threads_of_small = 32;
constexpr int64_t small_hidden = 1024;

constexpr auto trial_limit = std::chrono::seconds(5);

// Prefetches pause when less than `low` of about the last `memory` were of use; with more than `high`, the next pause is
// short again.
constexpr int memory = 128, low = 45, high = 60;       // percent
constexpr int first_pause = 256, longest_pause = 8192; // graphs

uint32_t load(const uint32_t * word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

} // namespace

bool Payoff::is_on() {
    if (pause_ > 0) {
        pause_ -= 1;
        return false;
    }
    return true;
}

bool Payoff::note(bool was_useful) {
    if (!may_pause_) {
        return true;
    }
    share_ += ((was_useful ? one : 0) - share_) / memory;
    n_ += 1;
    if (share_ * 100LL > (int64_t) one * high) {
        next_pause_ = 0;
    }
    if (n_ < memory || share_ * 100LL > (int64_t) one * low) {
        return true;
    }
    next_pause_ = std::min(std::max(2 * next_pause_, first_pause), longest_pause);
    pause_ = next_pause_;
    n_ = 0;
    share_ = one / 2;
    return false;
}

Predictor::Predictor(DeviceLookup & lookup, ggml_backend_dev_t device, const std::vector<int> & n_experts)
    : payoff(lookup.driver().prefetch_pauses != 0),
      distance(lookup.driver().layers_ahead, lookup.driver().prefetch_pauses != 0), rare_miss_layers(n_experts.size()),
      lookup_(lookup), device_(device) {
    scores_ = new_device_buffer(device, (max_scores + 1) * sizeof(float)); // the last word counts blocks
    mailboxes_ = new_pinned_buffer(device, n_experts.size() * mailbox_words * sizeof(uint32_t));
    if (!scores_ || !mailboxes_) {
        throw std::runtime_error("the device gave no memory for it");
    }
    try_out(device, n_experts[0]);
}

uint32_t * Predictor::mailbox(int layer) const {
    return static_cast<uint32_t *>(ggml_backend_buffer_get_base(mailboxes_.get())) + layer * mailbox_words;
}

bool Predictor::can(const Router & from, const Router & to, int64_t n_used, int64_t n_tokens) {
    return from.input && to.input && from.input->ne[0] == to.matrix->ne[0] && from.input->ne[1] == n_tokens &&
           n_tokens <= max_tokens && n_used * n_tokens <= DeviceLookup::max_rows && to.matrix->ne[1] <= max_experts &&
           to.matrix->ne[1] * n_tokens <= max_scores;
}

bool Predictor::reserve(size_t n_floats) {
    if (n_floats > n_saved_) {
        saved_ = new_device_buffer(device_, n_floats * sizeof(float));
        n_saved_ = saved_ ? n_floats : 0;
    }
    return n_floats <= n_saved_;
}

SavedRows Predictor::rows_to_save(const Router & from, const Router & to) const {
    const ggml_tensor * rows = from.state && to.state ? from.state : from.input;
    return { rows->data, rows->nb[1], (uint32_t) rows->ne[0], (uint32_t) rows->ne[1],
             static_cast<float *>(ggml_backend_buffer_get_base(saved_.get())) };
}

void Predictor::expect(int layer, const std::array<int32_t, n_candidates> & candidates, int n) {
    lookup_.launch_params(layer)[0] = (uint32_t) n;
    std::copy_n(candidates.begin(), n, lookup_.launch_params(layer) + first_candidate);
}

bool Predictor::queue(int layer, const Router & from, const Router & to, int64_t n_used, int64_t expert_bytes) {
    const float * norm = from.state && to.state ? static_cast<const float *>(to.norm->data) : nullptr;
    return launch(layer, to, norm, (uint32_t) to.matrix->ne[0], (uint32_t) from.input->ne[1], (uint32_t) n_used,
                  (uint32_t) to.matrix->ne[1],
                  (uint32_t) std::clamp<int64_t>(bytes_ahead / expert_bytes, 1, most_chosen));
}

bool Predictor::launch(int layer, const Router & to, const float * norm, uint32_t n_hidden, uint32_t n_tokens,
                       uint32_t n_used, uint32_t n_experts, uint32_t most) {
    const auto address = [](const ggml_tensor * tensor) {
        return tensor ? reinterpret_cast<uint64_t>(tensor->data) : 0;
    };
    uint64_t hidden = reinterpret_cast<uint64_t>(ggml_backend_buffer_get_base(saved_.get()));
    uint64_t router = address(to.matrix), row_bytes = to.matrix->nb[1], factors = reinterpret_cast<uint64_t>(norm);
    uint32_t type = (uint32_t) to.matrix->type, is_sigmoid = to.is_sigmoid, spared = n_spared;
    uint64_t bias = address(to.bias), late_bias = address(to.late_bias);
    float epsilon = to.epsilon;
    uint64_t ticket = lookup_.device_number(), launch_params = lookup_.device_launch_params(layer);
    uint64_t scores = reinterpret_cast<uint64_t>(ggml_backend_buffer_get_base(scores_.get()));
    uint64_t n_done = scores + max_scores * sizeof(float);
    uint64_t table = reinterpret_cast<uint64_t>(lookup_.device_table(layer)),
             at = reinterpret_cast<uint64_t>(mailbox(layer));
    void * arguments[] = { &hidden,        &n_hidden, &n_tokens,   &router,    &row_bytes, &type,   &factors,
                           &epsilon,       &bias,     &is_sigmoid, &late_bias, &n_used,    &spared, &ticket,
                           &launch_params, &most,     &scores,     &n_done,    &table,     &at };
    const expertier_device_lookup & driver = lookup_.driver();
    const unsigned threads = n_hidden < small_hidden ? n_threads_of_small : n_threads;
    return driver.launch(driver.predict, n_experts, 1, 1, threads, 1, 1, 0, driver.stream, arguments, nullptr) == 0;
}

bool Predictor::has_arrived(int layer) const { return load(mailbox(layer) + posted) == lookup_.number(); }
int Predictor::n_chosen(int layer) const { return (int) load(mailbox(layer) + number); }
int32_t Predictor::chosen(int layer, int i) const {
    return (int32_t) load(mailbox(layer) + first_chosen + 2 * size_t(i));
}
int Predictor::candidate(int layer, int i) const {
    return (int) load(mailbox(layer) + first_chosen + 2 * size_t(i) + 1);
}
const int32_t * Predictor::predicted(int layer) const {
    return reinterpret_cast<const int32_t *>(mailbox(layer) + first_predicted);
}

// Predicts layer 0 from zeros: all experts score alike, so the first is used. It is in no slot, and one slot is FREE.
void Predictor::try_out(ggml_backend_dev_t device, int n_experts) {
    constexpr uint32_t n_hidden = 64;
    Buffer memory = new_device_buffer(device, n_hidden * sizeof(float)); // zeros
    if (!memory || !reserve(n_hidden)) {
        throw std::runtime_error("the device gave no memory for a trial of predictions");
    }
    ggml_tensor row = bytes_at(memory.get(), ggml_backend_buffer_get_base(memory.get()), n_hidden * sizeof(float));
    row.type = GGML_TYPE_F32;
    row.nb[1] = 0; // every expert's
    Router router;
    router.matrix = &row;
    std::array<int32_t, n_candidates> candidates{};
    candidates[0] = -1;
    lookup_.begin_graph();
    expect(0, candidates, 1);
    const Stream compute(ggml_backend_dev_init(device, nullptr));
    if (n_experts > max_experts || !compute || !lookup_.send_launch_params(compute.get()) ||
        !launch(0, router, nullptr, n_hidden, 1, 1, (uint32_t) n_experts, 1)) {
        throw std::runtime_error("the driver refused to queue a prediction");
    }
    const auto deadline = std::chrono::steady_clock::now() + trial_limit;
    while (!has_arrived(0) && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
    }
    if (!has_arrived(0) || n_chosen(0) != 1 || chosen(0, 0) != 0 || candidate(0, 0) != 0 || predicted(0)[0] != 0) {
        throw std::runtime_error("a trial of a prediction did not choose the expert that it should");
    }
}

} // namespace expertier
