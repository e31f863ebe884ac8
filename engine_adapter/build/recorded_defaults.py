"""What the pinned engines' `llama_model_default_params()` and `llama_context_default_params()` return.

Recorded once with each pin, from the pinned library through the pinned headers, and compared at every load.
Enumerations are integers, pointers None or "set".
"""

from __future__ import annotations

from expertier.engine_adapter.build.defaults import Defaults

XLLAMACPP_2026_10_11549: Defaults = {
    "model": {
        "devices": None,
        "tensor_buft_overrides": None,
        "n_gpu_layers": -1,
        "split_mode": 1,
        "load_mode": -1,
        "lazy_mode": 1,
        "main_gpu": 0,
        "tensor_split": None,
        "progress_callback": None,
        "progress_callback_user_data": None,
        "kv_overrides": None,
        "vocab_only": False,
        "check_tensors": False,
        "use_extra_bufts": True,
        "no_host": False,
        "no_alloc": False,
        "load_mtp": False,
    },
    "context": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_rs_seq": 0,
        "n_outputs_max": 0,
        "n_outputs_max_per_seq": 1,
        "n_threads": 4,
        "n_threads_batch": 4,
        "ctx_type": 0,
        "rope_scaling_type": -1,
        "pooling_type": -1,
        "attention_type": -1,
        "flash_attn_type": -1,
        "rope_freq_base": 0.0,
        "rope_freq_scale": 0.0,
        "yarn_ext_factor": -1.0,
        "yarn_attn_factor": -1.0,
        "yarn_beta_fast": -1.0,
        "yarn_beta_slow": -1.0,
        "yarn_orig_ctx": 0,
        "defrag_thold": -1.0,
        "cb_eval": None,
        "cb_eval_user_data": None,
        "type_k": 1,
        "type_v": 1,
        "moe_cache_size": 0,
        "abort_callback": None,
        "abort_callback_data": None,
        "embeddings": False,
        "offload_kqv": True,
        "no_perf": True,
        "op_offload": True,
        "swa_full": True,
        "kv_unified": False,
        "samplers": None,
        "n_samplers": 0,
        "ctx_other": None,
    },
}
