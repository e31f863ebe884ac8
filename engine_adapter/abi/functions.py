"""The signatures of the functions that our two C libraries export: the proxy, and the host library."""

from __future__ import annotations

import ctypes as ct

from expertier.engine_adapter.abi.structs import (
    INT32_POINTER,
    Binding,
    Compute,
    ComputeCounts,
    ContextOptions,
    DeviceLookup,
    FullTensor,
    HostLive,
    LoadCounts,
    ModelOptions,
    Split,
)

_BLOCK_SIZE = (ct.c_int32, (ct.c_int32, ct.POINTER(ct.c_int64), ct.POINTER(ct.c_int64)))  # 0: no such type
_TEXT = (ct.c_char_p, ct.c_size_t)  # a buffer for a message, and its size

_PROXY_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "expertier_proxy_abi": (ct.c_int32, ()),
    "expertier_proxy_api_version": (ct.c_int32, ()),
    "expertier_proxy_block_size": _BLOCK_SIZE,
    "expertier_proxy_device_name": (ct.c_char_p, (ct.c_int32,)),
    "expertier_tiers_bind": (ct.c_void_p, (ct.POINTER(Binding), ct.c_char_p, *_TEXT)),
    "expertier_tiers_open_device_lookup": (ct.c_int32, (ct.c_void_p, ct.POINTER(DeviceLookup), *_TEXT)),
    "expertier_proxy_can_wrap": (ct.c_int32, ()),
    "expertier_tiers_open_compute": (ct.c_int32, (ct.c_void_p, ct.POINTER(Compute), *_TEXT)),
    "expertier_tiers_compute_counts": (None, (ct.c_void_p, ct.POINTER(ComputeCounts))),
    "expertier_tiers_unbind": (None, (ct.c_void_p,)),
    "expertier_tiers_begin_load": (None, (ct.c_void_p,)),
    "expertier_tiers_end_load": (None, ()),
    "expertier_tiers_set_default": (None, (ct.c_void_p,)),
    "expertier_tiers_unplaced": (ct.c_int32, (ct.c_void_p, *_TEXT)),
    "expertier_show_only": (None, (ct.POINTER(ct.c_char_p), ct.c_int32, ct.c_int32)),
    "expertier_show_all": (None, ()),
    "expertier_tiers_set_fills": (None, (ct.c_void_p, ct.c_int32)),
    "expertier_tiers_device_name": (ct.c_char_p, (ct.c_void_p,)),
    "expertier_tiers_buffer_name": (ct.c_char_p, (ct.c_void_p,)),
    "expertier_tiers_device": (ct.c_void_p, (ct.c_void_p,)),
    "expertier_tiers_buffer_type": (ct.c_void_p, (ct.c_void_p,)),
    "expertier_split_buffer_type": (
        ct.c_void_p,
        (ct.POINTER(ct.c_void_p), ct.c_int32, ct.POINTER(ct.c_char_p), ct.POINTER(Split), ct.c_int32, *_TEXT),
    ),
    "expertier_name_split_type": (ct.c_char_p, (ct.c_void_p, ct.c_void_p)),
    "expertier_take_error": (ct.c_int32, _TEXT),
    "expertier_tiers_counters": (ct.c_int32, (ct.c_void_p, ct.POINTER(ct.c_int64), ct.c_int32)),
    "expertier_device_is_host": (ct.c_int32, (ct.c_char_p,)),
    "expertier_device_memory": (
        ct.c_int32,
        (ct.c_char_p, ct.POINTER(ct.c_int64), ct.POINTER(ct.c_int64)),
    ),
    "expertier_memory_alloc": (ct.c_int64, (ct.c_char_p, ct.c_int32, ct.c_uint64)),
    "expertier_memory_free": (ct.c_int32, (ct.c_uint64,)),
    "expertier_memory_copy_in": (ct.c_int32, (ct.c_uint64, ct.c_void_p, ct.c_uint64)),
    "expertier_memory_copy_out": (ct.c_int32, (ct.c_void_p, ct.c_uint64, ct.c_uint64)),
    "expertier_memory_relocate": (
        ct.c_int32,
        (ct.c_uint64, ct.c_void_p, ct.c_int64, ct.c_void_p, ct.c_int64),
    ),
    "expertier_memory_finish": (ct.c_int32, (ct.c_uint64,)),
    "expertier_memory_zero": (ct.c_int32, (ct.c_uint64, ct.c_uint64)),
}

_HOST_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "expertier_host_abi": (ct.c_int32, ()),
    "expertier_host_start": (None, ()),
    "expertier_host_defaults": (ct.c_char_p, ()),
    "expertier_host_take_log": (ct.c_int64, (ct.c_int32, *_TEXT)),
    "expertier_host_block_size": _BLOCK_SIZE,
    "expertier_host_devices": (ct.c_char_p, ()),
    "expertier_host_count_live": (None, (ct.POINTER(HostLive),)),
    "expertier_host_stock_devices": (ct.c_void_p, ()),
    "expertier_host_mul_mat_id": (
        ct.c_int32,
        (
            ct.c_void_p,
            ct.c_void_p,
            ct.c_char_p,
            ct.c_int64,
            ct.c_int64,
            ct.c_int64,
            ct.c_void_p,
            ct.c_void_p,
            ct.c_int64,
            ct.c_int64,
            ct.c_void_p,
        ),
    ),
    "expertier_model_open": (ct.c_void_p, (ct.POINTER(ModelOptions), *_TEXT)),
    "expertier_model_splits": (
        ct.c_int32,
        (ct.c_void_p, ct.c_int32, ct.POINTER(FullTensor), ct.c_int32, ct.POINTER(Split)),
    ),
    "expertier_model_close": (None, (ct.c_void_p,)),
    "expertier_model_hand_over": (ct.c_void_p, (ct.c_void_p,)),
    "expertier_model_load_counts": (None, (ct.c_void_p, ct.POINTER(LoadCounts))),
    "expertier_model_n_vocab": (ct.c_int32, (ct.c_void_p,)),
    "expertier_model_n_ctx_train": (ct.c_int32, (ct.c_void_p,)),
    "expertier_model_tokenize": (
        ct.c_int32,
        (ct.c_void_p, ct.c_char_p, ct.c_int32, INT32_POINTER, ct.c_int32),
    ),
    "expertier_model_piece": (ct.c_int32, (ct.c_void_p, ct.c_int32, ct.c_char_p, ct.c_int32)),
    "expertier_model_is_end": (ct.c_int32, (ct.c_void_p, ct.c_int32)),
    "expertier_context_open": (ct.c_void_p, (ct.c_void_p, ct.POINTER(ContextOptions), *_TEXT)),
    "expertier_context_close": (None, (ct.c_void_p,)),
    "expertier_context_end_tensors": (ct.c_int32, (ct.c_void_p,)),
    "expertier_context_n_ctx": (ct.c_int32, (ct.c_void_p,)),
    "expertier_context_n_batch": (ct.c_int32, (ct.c_void_p,)),
    "expertier_context_abort": (None, (ct.c_void_p,)),
    "expertier_context_decode": (
        ct.c_int32,
        (ct.c_void_p, INT32_POINTER, ct.c_int32, ct.c_int32, ct.c_int32, ct.c_int32),
    ),
    "expertier_context_logits": (ct.POINTER(ct.c_float), (ct.c_void_p, ct.c_int32)),
    "expertier_context_forget": (ct.c_int32, (ct.c_void_p, ct.c_int32, ct.c_int32)),
    "expertier_context_discard": (None, (ct.c_void_p, ct.c_int32, ct.c_int32)),
    "expertier_context_set_sampler": (ct.c_int32, (ct.c_void_p, ct.c_float, ct.c_uint32)),
    "expertier_context_sample": (ct.c_int32, (ct.c_void_p,)),
}


def declare_proxy(library: ct.CDLL) -> None:
    """Give the proxy library's functions their signatures."""
    _declare(library, _PROXY_FUNCTIONS)


def declare_host(library: ct.CDLL) -> None:
    """Give the host library's functions their signatures."""
    _declare(library, _HOST_FUNCTIONS)


def _declare(library: ct.CDLL, functions: dict[str, tuple[object, tuple[object, ...]]]) -> None:
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
