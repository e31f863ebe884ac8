// Batches of llama.h's own that hold tokens of several sequences, which the host library's contexts do not make.

#include "llama.h"

#include <algorithm>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT llama_context * sequence_batches_open(llama_model * model, int32_t n_sequences) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 128 * n_sequences;
    params.n_seq_max = n_sequences;
    params.n_threads = params.n_threads_batch = 1;
    return llama_init_from_model(model, params);
}

EXPORT void sequence_batches_close(llama_context * context) { llama_free(context); }

// Decodes one batch of `n` rows, each a token at a position of a sequence; fills the logits of all rows. Returns the
// engine's status.
EXPORT int32_t sequence_batches_decode(llama_context * context, int32_t n, const llama_token * tokens,
                                       const llama_pos * positions, const llama_seq_id * sequences, int32_t n_vocab,
                                       float * logits) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int32_t row = 0; row < n; row++) {
        batch.token[row] = tokens[row];
        batch.pos[row] = positions[row];
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = sequences[row];
        batch.logits[row] = true;
    }
    const int32_t status = llama_decode(context, batch);
    for (int32_t row = 0; row < n && status == 0; row++) {
        std::copy_n(llama_get_logits_ith(context, row), n_vocab, logits + (int64_t) row * n_vocab);
    }
    llama_batch_free(batch);
    return status;
}
