// The engine's default parameters as JSON, field by field. Python compares them with recorded values: a library whose
// structs have another layout gives other values.

#include "llama_host/abi.h"
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <string>
#include <type_traits>

namespace {

class Object {
  public:
    template <typename T> void add(const char * name, const T & value) {
        text_ += text_.empty() ? "{" : ", ";
        text_ += std::string("\"") + name + "\": " + json(value);
    }
    std::string text() const { return text_ + "}"; }

  private:
    template <typename T> static std::string json(const T & value) {
        if constexpr (std::is_pointer_v<T>) {
            return value ? "\"set\"" : "null";
        } else if constexpr (std::is_same_v<T, bool>) {
            return value ? "true" : "false";
        } else if constexpr (std::is_floating_point_v<T>) {
            char digits[32];
            snprintf(digits, sizeof(digits), "%.9g", (double) value);
            return std::isfinite(value) ? std::string(digits) : "\"not finite\"";
        } else {
            return std::to_string((long long) value);
        }
    }
    std::string text_;
};

// Adds a field that not every release has.
template <typename P, typename F>
auto add_if(Object & object, const char * name, const P & params, F get, int) -> decltype(get(params), void()) {
    object.add(name, get(params));
}
template <typename P, typename F> void add_if(Object &, const char *, const P &, F, long) {}

#define ADD(field) object.add(#field, params.field)
#define ADD_IF_THERE(field)                                                                                            \
    add_if(object, #field, params, [](const auto & of) -> decltype(of.field) { return of.field; }, 0)

std::string model_defaults() {
    const llama_model_params params = llama_model_default_params();
    Object object;
    ADD(devices);
    ADD(tensor_buft_overrides);
    ADD(n_gpu_layers);
    ADD(split_mode);
    ADD(load_mode);
    ADD_IF_THERE(lazy_mode);
    ADD(main_gpu);
    ADD(tensor_split);
    ADD(progress_callback);
    ADD(progress_callback_user_data);
    ADD(kv_overrides);
    ADD(vocab_only);
    ADD(check_tensors);
    ADD(use_extra_bufts);
    ADD(no_host);
    ADD(no_alloc);
    ADD_IF_THERE(load_mtp);
    return object.text();
}

std::string context_defaults() {
    const llama_context_params params = llama_context_default_params();
    Object object;
    ADD(n_ctx);
    ADD(n_batch);
    ADD(n_ubatch);
    ADD(n_seq_max);
    ADD_IF_THERE(n_rs_seq);
    ADD_IF_THERE(n_outputs_max);
    ADD_IF_THERE(n_outputs_max_per_seq);
    ADD(n_threads);
    ADD(n_threads_batch);
    ADD_IF_THERE(ctx_type);
    ADD(rope_scaling_type);
    ADD(pooling_type);
    ADD(attention_type);
    ADD(flash_attn_type);
    ADD(rope_freq_base);
    ADD(rope_freq_scale);
    ADD(yarn_ext_factor);
    ADD(yarn_attn_factor);
    ADD(yarn_beta_fast);
    ADD(yarn_beta_slow);
    ADD(yarn_orig_ctx);
    ADD(defrag_thold);
    ADD(cb_eval);
    ADD(cb_eval_user_data);
    ADD(type_k);
    ADD(type_v);
    ADD_IF_THERE(moe_cache_size);
    ADD(abort_callback);
    ADD(abort_callback_data);
    ADD(embeddings);
    ADD(offload_kqv);
    ADD(no_perf);
    ADD(op_offload);
    ADD(swa_full);
    ADD(kv_unified);
    ADD(samplers);
    ADD(n_samplers);
    ADD_IF_THERE(ctx_other);
    return object.text();
}

} // namespace

EXPERTIER_EXPORT const char * expertier_host_defaults(void) {
    static const std::string text = "{\"model\": " + model_defaults() + ", \"context\": " + context_defaults() + "}";
    return text.c_str();
}
