// Runs batches: one context of a model with its key-value cache, its logits and its sampler.

#include "host_abi.h"
#include "host_log.h"
#include "host_model.h"

#include <cstring>
#include <memory>
#include <string>

using namespace expertier;

struct expertier_context {
    llama_context * context = nullptr;
    llama_sampler * sampler = nullptr;
    llama_batch     batch   = {};
    int32_t         n_batch = 0;
    int32_t         n_vocab = 0;
};

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

// Null and `error` filled when the engine refuses the context.
EXPERTIER_EXPORT expertier_context * expertier_context_open(expertier_model *                 model,
                                                            const expertier_context_options * options, char * error,
                                                            size_t error_size) {
    if (options->abi != EXPERTIER_HOST_ABI) {
        snprintf(error, error_size, "the host library speaks another interface; run `expertier engine build`");
        return nullptr;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = options->n_ctx;
    params.n_batch              = options->n_batch;
    params.n_ubatch             = options->n_ubatch;
    params.n_seq_max            = options->n_seq_max;
    params.n_threads            = options->n_threads;
    params.n_threads_batch      = options->n_threads;
    params.flash_attn_type      = (llama_flash_attn_type) options->flash_attention;

    auto * self   = new expertier_context;
    self->context = llama_init_from_model(model->model, params);
    if (self->context == nullptr) {
        snprintf(error, error_size, "%s", take_engine_log(GGML_LOG_LEVEL_WARN).c_str());
        expertier_context_close(self);
        return nullptr;
    }
    self->batch   = llama_batch_init(options->n_batch, 0, 1);
    self->n_batch = options->n_batch;
    self->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model->model));
    return self;
}

// Tokens that fit in the key-value cache: the engine rounds up what was asked for.
EXPERTIER_EXPORT int32_t expertier_context_n_ctx(const expertier_context * self) {
    return (int32_t) llama_n_ctx(self->context);
}

// Runs `n` tokens (at most n_batch) of sequence `sequence` from `position` on; the engine's own status.
// Logits are kept for all of them, or for the last one only.
EXPERTIER_EXPORT int32_t expertier_context_decode(expertier_context * self, const int32_t * tokens, int32_t n,
                                                  int32_t position, int32_t sequence, int32_t all_logits) {
    self->batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        self->batch.token[i]     = tokens[i];
        self->batch.pos[i]       = position + i;
        self->batch.n_seq_id[i]  = 1;
        self->batch.seq_id[i][0] = sequence;
        self->batch.logits[i]    = all_logits || i == n - 1;
    }
    const int32_t status = llama_decode(self->context, self->batch);
    if (status == 0) {
        llama_synchronize(self->context);
    }
    return status;
}

// Logits of token `index` of the last batch, counted from its end when negative; null when none were kept.
EXPERTIER_EXPORT const float * expertier_context_logits(expertier_context * self, int32_t index) {
    return llama_get_logits_ith(self->context, index);
}

// Removes what the cache holds of `sequence` from `position` on.
EXPERTIER_EXPORT void expertier_context_forget(expertier_context * self, int32_t sequence, int32_t position) {
    llama_memory_seq_rm(llama_get_memory(self->context), sequence, position, -1);
}

// Sets how expertier_context_sample picks: greedily at temperature 0, else from top-k 40, top-p 0.95, min-p 0.05.
EXPERTIER_EXPORT void expertier_context_set_sampler(expertier_context * self, float temperature, uint32_t seed) {
    if (self->sampler) {
        llama_sampler_free(self->sampler);
    }
    self->sampler = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (temperature <= 0) {
        llama_sampler_chain_add(self->sampler, llama_sampler_init_greedy());
        return;
    }
    llama_sampler_chain_add(self->sampler, llama_sampler_init_top_k(40));
    llama_sampler_chain_add(self->sampler, llama_sampler_init_top_p(0.95f, 1));
    llama_sampler_chain_add(self->sampler, llama_sampler_init_min_p(0.05f, 1));
    llama_sampler_chain_add(self->sampler, llama_sampler_init_temp(temperature));
    llama_sampler_chain_add(self->sampler, llama_sampler_init_dist(seed));
}

// The next token after the last batch.
EXPERTIER_EXPORT int32_t expertier_context_sample(expertier_context * self) {
    return llama_sampler_sample(self->sampler, self->context, -1);
}
