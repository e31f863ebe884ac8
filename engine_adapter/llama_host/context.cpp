// Runs batches: one context of a model with its key-value cache, its logits and its sampler.

#include "llama_host/abi.h"
#include "llama_host/guard.h"
#include "llama_host/live.h"
#include "llama_host/log.h"
#include "llama_host/model.h"
#include "llama_host/tensors.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace expertier;

struct expertier_context : Counted<expertier_context> {
    llama_context * context = nullptr;
    llama_sampler * sampler = nullptr;
    llama_batch batch = {};
    int32_t n_batch = 0;
    bool has_rows = false;     // the last batch succeeded, so there are logits
    std::vector<char> is_lost; // for each sequence, whether a failed batch has emptied its part of the cache
    std::atomic<bool> aborted{ false };
    TensorFile tensors;
};

namespace {

bool is_aborted(void * self) { return static_cast<expertier_context *>(self)->aborted; }

constexpr int32_t no_room = 1, invalid_batch = -1; // the engine's statuses for batches that it does not begin
constexpr int32_t threw = -100;                    // our status: the engine threw, most likely for want of memory
constexpr int32_t lost = -101;                     // our status: the sequence must start anew, at position 0

// A greedy sampler at temperature 0; otherwise one with top-k 40, top-p 0.95 and min-p 0.05.
llama_sampler * new_sampler(float temperature, uint32_t seed) {
    llama_sampler * sampler = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (temperature <= 0) {
        llama_sampler_chain_add(sampler, llama_sampler_init_greedy());
        return sampler;
    }
    llama_sampler_chain_add(sampler, llama_sampler_init_top_k(40));
    llama_sampler_chain_add(sampler, llama_sampler_init_top_p(0.95f, 1));
    llama_sampler_chain_add(sampler, llama_sampler_init_min_p(0.05f, 1));
    llama_sampler_chain_add(sampler, llama_sampler_init_temp(temperature));
    llama_sampler_chain_add(sampler, llama_sampler_init_dist(seed));
    return sampler;
}

// Sets the size of the engine's own cache of experts, which not every release has. False when this release has none and
// `n_bytes` is not 0.
template <typename P> auto set_moe_cache(P & params, uint64_t n_bytes, int) -> decltype(params.moe_cache_size, bool()) {
    params.moe_cache_size = n_bytes;
    return true;
}
template <typename P> bool set_moe_cache(P &, uint64_t n_bytes, long) { return n_bytes == 0; }

bool is_sequence(const expertier_context * self, int32_t sequence) {
    return sequence >= 0 && sequence < (int32_t) self->is_lost.size(); // with any other, the engine ends the process
}

} // namespace

EXPERTIER_EXPORT void expertier_host_count_live(expertier_host_live * out) {
    out->models = Counted<expertier_model>::live();
    out->contexts = Counted<expertier_context>::live();
}

EXPERTIER_EXPORT void expertier_context_close(expertier_context * self) {
    if (self->sampler) {
        llama_sampler_free(self->sampler);
    }
    if (self->n_batch) {
        llama_batch_free(self->batch);
    }
    if (self->context) {
        llama_free(self->context);
    }
    delete self;
}

// Opens a context. Returns null and fills `error` when the engine refuses it.
EXPERTIER_EXPORT expertier_context * expertier_context_open(expertier_model * model,
                                                            const expertier_context_options * options, char * error,
                                                            size_t error_size) {
    if (options->abi != EXPERTIER_HOST_ABI) {
        snprintf(error, error_size, "the host library speaks another interface; run `expertier engine build`");
        return nullptr;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = options->n_ctx;
    params.n_batch = options->n_batch;
    params.n_ubatch = options->n_ubatch;
    params.n_seq_max = options->n_seq_max;
    params.n_threads = options->n_threads;
    params.n_threads_batch = options->n_threads;
    params.flash_attn_type = (llama_flash_attn_type) options->flash_attention;
    if (!set_moe_cache(params, options->moe_cache_bytes, 0)) {
        snprintf(error, error_size, "this release of llama.cpp has no cache of experts of its own (moe_cache_size)");
        return nullptr;
    }

    return guarded<expertier_context *>(nullptr, [&]() -> expertier_context * {
        snprintf(error, error_size, "out of memory");
        std::unique_ptr<expertier_context, decltype(&expertier_context_close)> self(new expertier_context,
                                                                                    expertier_context_close);
        params.abort_callback = is_aborted;
        params.abort_callback_data = self.get();
        if (options->tensors_path) {
            if (!self->tensors.open(options->tensors_path)) {
                snprintf(error, error_size, "%s: %s", options->tensors_path, strerror(errno));
                return nullptr;
            }
            params.cb_eval = TensorFile::evaluated;
            params.cb_eval_user_data = &self->tensors;
        }
        self->context = llama_init_from_model(model->model, params);
        if (self->context == nullptr) {
            snprintf(error, error_size, "%s", take_engine_log(GGML_LOG_LEVEL_WARN).c_str());
            return nullptr;
        }
        self->is_lost.resize(llama_n_seq_max(self->context));
        self->n_batch = (int32_t) llama_n_batch(self->context); // the engine may have changed the value asked for
        self->batch = llama_batch_init(self->n_batch, 0, 1);
        self->sampler = new_sampler(0, 0);
        return self.release();
    });
}

// Closes the file of computed tensors. Returns 0 when not all of them could be written.
EXPERTIER_EXPORT int32_t expertier_context_end_tensors(expertier_context * self) { return self->tensors.close(); }

EXPERTIER_EXPORT int32_t expertier_context_n_batch(const expertier_context * self) { return self->n_batch; }

// How many tokens fit in the key-value cache: the engine rounds the number asked for up.
EXPERTIER_EXPORT int32_t expertier_context_n_ctx(const expertier_context * self) {
    return (int32_t) llama_n_ctx(self->context);
}

// Removes the tokens of `sequence` from `position` on from the cache. Returns 0 when there is no such sequence, or when
// the model has recurrent layers, which keep a single state of which no part can be removed.
EXPERTIER_EXPORT int32_t expertier_context_forget(expertier_context * self, int32_t sequence, int32_t position) {
    if (!is_sequence(self, sequence)) {
        return 0;
    }
    const bool done =
        guarded(false, [&] { return llama_memory_seq_rm(llama_get_memory(self->context), sequence, position, -1); });
    if (done && position <= 0) {
        self->is_lost[sequence] = false;
    }
    return done;
}

// Undoes the last batch: removes its results, and the tokens of `sequence` from `position` on from the cache. Where no
// part of the cache can be removed, the sequence's whole part is removed.
EXPERTIER_EXPORT void expertier_context_discard(expertier_context * self, int32_t sequence, int32_t position) {
    self->has_rows = false;
    if (!expertier_context_forget(self, sequence, position) && is_sequence(self, sequence)) {
        expertier_context_forget(self, sequence, 0);
        self->is_lost[sequence] = position > 0; // else the engine would continue without the tokens before `position`
    }
}

// Runs `n` tokens (1 to n_batch) of `sequence` from `position` on, and returns the engine's status, or one of the two
// above. Logits are kept for all tokens, or only for the last token. A batch that the engine does not begin leaves the
// cache as it was; a batch that fails is discarded.
EXPERTIER_EXPORT int32_t expertier_context_decode(expertier_context * self, const int32_t * tokens, int32_t n,
                                                  int32_t position, int32_t sequence, int32_t all_logits) {
    for (int32_t i = 0; i < n; i++) {
        self->batch.token[i] = tokens[i];
        self->batch.pos[i] = position + i;
        self->batch.n_seq_id[i] = 1;
        self->batch.seq_id[i][0] = sequence;
        self->batch.logits[i] = all_logits || i == n - 1;
    }
    self->batch.n_tokens = n;
    self->has_rows = false;
    self->aborted = false;
    const int32_t status = guarded(threw, [&] {
        take_engine_log(GGML_LOG_LEVEL_NONE); // drops this thread's messages about earlier batches
        if (position > 0 && is_sequence(self, sequence) && self->is_lost[sequence]) {
            return lost;
        }
        const int32_t result = llama_decode(self->context, self->batch);
        llama_synchronize(self->context);
        return result;
    });
    if (status == 0) {
        self->has_rows = true;
        if (is_sequence(self, sequence)) {
            self->is_lost[sequence] = false;
        }
    } else if (status != invalid_batch && status != no_room && status != lost) {
        expertier_context_discard(self, sequence, position);
    }
    return status;
}

// Has a decode that runs now end with status 2 as soon as the engine checks for that. Called from another thread, or
// from a callback inside the decode.
EXPERTIER_EXPORT void expertier_context_abort(expertier_context * self) { self->aborted = true; }

// The logits of token `index` of the last batch (counted from the batch's end when negative); null when none were kept.
EXPERTIER_EXPORT const float * expertier_context_logits(expertier_context * self, int32_t index) {
    return self->has_rows ? guarded<const float *>(nullptr, [&] { return llama_get_logits_ith(self->context, index); })
                          : nullptr;
}

// Sets how expertier_context_sample picks tokens. Returns 0 and changes nothing when memory ran out.
EXPERTIER_EXPORT int32_t expertier_context_set_sampler(expertier_context * self, float temperature, uint32_t seed) {
    return guarded(0, [&] {
        llama_sampler * sampler = new_sampler(temperature, seed);
        llama_sampler_free(self->sampler);
        self->sampler = sampler;
        return 1;
    });
}

// Picks the next token after the last batch; -1 when that batch kept no logits.
EXPERTIER_EXPORT int32_t expertier_context_sample(expertier_context * self) {
    return self->has_rows ? guarded(-1, [&] { return llama_sampler_sample(self->sampler, self->context, -1); }) : -1;
}
