"""ctypes mirrors of our own C structs (ggml_proxy/abi/abi.h, llama_host/abi.h); `functions.py` has the functions.

Only structs that expertier itself defines are mirrored: the engine's structs stay in C++ (D14).
"""

from __future__ import annotations

import ctypes as ct

from expertier.planner.policy.operations import OPERATIONS

PROXY_ABI = 11  # EXPERTIER_ABI in abi.h
HOST_ABI = 10  # EXPERTIER_HOST_ABI in llama_host/abi.h

INT32_POINTER = ct.POINTER(ct.c_int32)

FillCallback = ct.CFUNCTYPE(
    None, ct.c_void_p, ct.c_int32, ct.c_int32, INT32_POINTER, INT32_POINTER, INT32_POINTER
)
LoadCallback = ct.CFUNCTYPE(
    None, ct.c_void_p, ct.c_int32, ct.c_int32, INT32_POINTER, ct.c_uint64, INT32_POINTER
)
ReadCallback = ct.CFUNCTYPE(
    None, ct.c_void_p, ct.c_int32, ct.c_int32, ct.c_uint64, ct.c_uint64, ct.c_void_p, INT32_POINTER
)
MoveCallback = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_uint64, INT32_POINTER)
LookCallback = ct.CFUNCTYPE(None, ct.c_void_p, INT32_POINTER)
LoadGoesOn = ct.CFUNCTYPE(ct.c_int32)
FILLED = 0x46494C4C  # EXPERTIER_FILLED in abi.h
FILLS_SERVED, FILLS_ZEROS, FILLS_REFUSED = range(3)  # expertier_fills in abi.h
TEXT_ERROR = -(2**31)  # what tokenize and piece return where the engine threw


POLICY_FUNCTIONS = tuple(operation.name for operation in OPERATIONS if operation.for_engine)
"""The fields of `expertier_policy`, in its order."""


class Policy(ct.Structure):
    """expertier_policy: addresses of the compiled policy functions."""

    _fields_ = tuple((name, ct.c_void_p) for name in POLICY_FUNCTIONS)


class DeviceLookup(ct.Structure):
    """expertier_device_lookup: driver calls, kernels and a stream, by address; limits and captures."""

    _fields_ = (
        ("launch", ct.c_void_p),
        ("stream_wait", ct.c_void_p),
        ("event_record", ct.c_void_p),
        ("function", ct.c_void_p),
        ("stream", ct.c_void_p),
        ("spin_limit", ct.c_uint32),
        ("predict", ct.c_void_p),
        ("event_query", ct.c_void_p),
        ("layers_ahead", ct.c_int32),
        ("prefetch_pauses", ct.c_int32),
        ("copy", ct.c_void_p),
        ("capture_begin", ct.c_void_p),
        ("capture_end", ct.c_void_p),
        ("graph_instantiate", ct.c_void_p),
        ("graph_launch", ct.c_void_p),
        ("graph_exec_destroy", ct.c_void_p),
        ("graph_destroy", ct.c_void_p),
        ("graph_exec_update", ct.c_void_p),
    )


class Matrix(ct.Structure):
    """expertier_matrix: one expert matrix of a layer, over all slots."""

    _fields_ = (
        ("name", ct.c_char_p),
        ("type", ct.c_int32),
        ("ne0", ct.c_int64),
        ("ne1", ct.c_int64),
        ("expert_bytes", ct.c_uint64),
        ("offset", ct.c_uint64),
        ("stride", ct.c_uint64),
        ("streamed_offset", ct.c_uint64),
        ("streamed_stride", ct.c_uint64),
    )


class Copy(ct.Structure):
    """expertier_copy: one piece of an expert, in a host block, in a slot and in a streamed layer."""

    _fields_ = tuple(
        (name, ct.c_uint64)
        for name in ("source", "offset", "stride", "streamed_offset", "streamed_stride", "n_bytes")
    )


class Layer(ct.Structure):
    """expertier_layer: one layer's experts and slots."""

    _fields_ = (
        ("n_experts", ct.c_int32),
        ("n_slots", ct.c_int32),
        ("n_matrices", ct.c_int32),
        ("matrices", ct.POINTER(Matrix)),
        ("n_copies", ct.c_int32),
        ("copies", ct.POINTER(Copy)),
        ("streamed_bytes", ct.c_uint64),
        ("first_copy", ct.c_int64),
    )


class HostCopies(ct.Structure):
    """expertier_host_copies: addresses of the arrays of tiers/host_pool/copy_directory.py."""

    _fields_ = tuple((name, ct.c_void_p) for name in ("lock", "address", "readers", "used", "hits"))


class Binding(ct.Structure):
    """expertier_binding: a model's tiers as handed to the proxy."""

    _fields_ = (
        ("abi", ct.c_int32),
        ("n_layers", ct.c_int32),
        ("layers", ct.POINTER(Layer)),
        ("slab_base", ct.c_void_p),
        ("slab_bytes", ct.c_uint64),
        ("directory", ct.c_void_p),
        ("locks", ct.c_void_p),
        ("policy", Policy),
        ("fill", FillCallback),
        ("load", LoadCallback),
        ("read", ReadCallback),
        ("fill_context", ct.c_void_p),
        ("host_copies", HostCopies),
        ("sees_all", ct.c_int32),
        ("stream_tokens", ct.c_int32),
    )


class Compute(ct.Structure):
    """expertier_compute: the slab's low end, for the engine's compute buffers."""

    _fields_ = (
        ("move", MoveCallback),
        ("context", ct.c_void_p),
        ("binding", ct.POINTER(Binding)),
        ("compute_bytes", ct.c_uint64),
        ("most_bytes", ct.c_uint64),
        ("move_cost_bytes", ct.c_int64),
        ("cut_cost_bytes", ct.c_int64),
        ("look", LookCallback),
        ("look_graphs", ct.c_int32),
    )


class ComputeCounts(ct.Structure):
    """expertier_compute_counts: the engine's use of the slab for computing, and the moves of the boundary."""

    _fields_ = tuple(
        (name, ct.c_int64)
        for name in (
            "moves_up",
            "moves_down",
            "failed_moves",
            "quota_moves",
            "move_ns",
            "drain_ns",
            "queue_ns",
            "wait_ns",
            "copies",
            "boundary_bytes",
            "needed_bytes",
            "buffers",
            "buffer_bytes",
        )
    )


class File(ct.Structure):
    """expertier_file: a file of the model, and what tells whether its path still names that file."""

    _fields_ = (
        ("path", ct.c_char_p),
        ("n_bytes", ct.c_int64),
        ("mtime_ns", ct.c_int64),
        ("ctime_ns", ct.c_int64),
        ("inode", ct.c_int64),
        ("device", ct.c_int64),
    )


class Extent(ct.Structure):
    """expertier_extent: bytes of what the loader sees, and where they come from."""

    _fields_ = (
        ("begin", ct.c_int64),
        ("end", ct.c_int64),
        ("file", ct.c_int32),
        ("offset", ct.c_int64),
    )


class Placed(ct.Structure):
    """expertier_placed: a proxy device, and the part of the model that is placed on it."""

    _fields_ = (
        ("device", ct.c_void_p),
        ("experts_type", ct.c_void_p),
        ("experts_regex", ct.c_char_p),
        ("units", ct.c_int32),
    )


class ModelOptions(ct.Structure):
    """expertier_model_options: how the host library opens a model."""

    _fields_ = (
        ("abi", ct.c_int32),
        ("path", ct.c_char_p),
        ("placed", ct.POINTER(Placed)),
        ("n_placed", ct.c_int32),
        ("device_names", ct.c_char_p),
        ("files", ct.POINTER(File)),
        ("n_files", ct.c_int32),
        ("extents", ct.POINTER(Extent)),
        ("n_extents", ct.c_int32),
        ("header", ct.c_char_p),
        ("experts_in_ram", ct.c_int32),
        ("is_mapped", ct.c_int32),
        ("repack", ct.c_int32),
        ("params", ct.c_void_p),
        ("params_bytes", ct.c_uint64),
        ("splits_tensors", ct.c_int32),
        ("tensor_split", ct.POINTER(ct.c_float)),
        ("is_measured", ct.c_int32),
        ("goes_on", LoadGoesOn),
    )


class HostLive(ct.Structure):
    """expertier_host_live: models and contexts of the host library that are open."""

    _fields_ = (("models", ct.c_int32), ("contexts", ct.c_int32))


class FullTensor(ct.Structure):
    """expertier_full_tensor: a tensor that may be split among devices."""

    _fields_ = (("name", ct.c_char_p), ("type", ct.c_int32), ("ne", ct.c_int64 * 4))


MAX_SEGMENTS = 16  # EXPERTIER_MAX_SEGMENTS in split_abi.h
MAX_SPLIT_DEVICES = 16  # EXPERTIER_MAX_SPLIT_DEVICES


class Split(ct.Structure):
    """expertier_split: how the engine divides one tensor among devices."""

    _fields_ = (
        ("axis", ct.c_int32),
        ("n_segments", ct.c_int32),
        ("repeats", ct.c_uint32 * MAX_SEGMENTS),
        ("ne", ct.c_int64 * (MAX_SEGMENTS * MAX_SPLIT_DEVICES)),
    )


class LoadCounts(ct.Structure):
    """expertier_load_counts: bytes that the loader read."""

    _fields_ = (("bytes_read", ct.c_int64), ("expert_bytes", ct.c_int64))


class ContextOptions(ct.Structure):
    """expertier_context_options: how the host library opens a context."""

    _fields_ = (
        ("abi", ct.c_int32),
        ("n_ctx", ct.c_int32),
        ("n_batch", ct.c_int32),
        ("n_ubatch", ct.c_int32),
        ("n_seq_max", ct.c_int32),
        ("n_threads", ct.c_int32),
        ("flash_attention", ct.c_int32),
        ("moe_cache_bytes", ct.c_uint64),
        ("tensors_path", ct.c_char_p),
    )
