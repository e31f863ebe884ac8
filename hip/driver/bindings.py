"""The driver calls that we use, in one table for HIP and CUDA.

Each row of `CALLS` is (HIP's symbol, CUDA's symbol, argument types). The calls have the same arguments and meaning
under both names; `vendor.py` and `driver.py` deal with the differences. No library is loaded when this file is
imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any, TypeAlias

from expertier.hip.driver.structs import AccessDescriptor, AllocationProperties

ArgTypes: TypeAlias = tuple[Any, ...]

_HANDLE_OUT = POINTER(c_void_p)
_INT_OUT = POINTER(c_int)
_SIZE_OUT = POINTER(c_size_t)
_COPY = (c_void_p, c_void_p, c_size_t, c_void_p)

CALLS: dict[str, tuple[str, str, ArgTypes]] = {
    # the driver and its devices
    "init": ("hipInit", "cuInit", (c_uint,)),
    "device_count": ("hipGetDeviceCount", "cuDeviceGetCount", (_INT_OUT,)),
    "version": ("hipRuntimeGetVersion", "cuDriverGetVersion", (_INT_OUT,)),
    "device_name": ("hipDeviceGetName", "cuDeviceGetName", (c_char_p, c_int, c_int)),
    "attribute": ("hipDeviceGetAttribute", "cuDeviceGetAttribute", (_INT_OUT, c_int, c_int)),
    "can_access_peer": ("hipDeviceCanAccessPeer", "cuDeviceCanAccessPeer", (_INT_OUT, c_int, c_int)),
    "synchronize": ("hipDeviceSynchronize", "cuCtxSynchronize", ()),
    # memory
    "memory_info": ("hipMemGetInfo", "cuMemGetInfo_v2", (_SIZE_OUT, _SIZE_OUT)),
    "alloc": ("hipMalloc", "cuMemAlloc_v2", (_HANDLE_OUT, c_size_t)),
    "free": ("hipFree", "cuMemFree_v2", (c_void_p,)),
    "host_alloc": ("hipHostMalloc", "cuMemHostAlloc", (_HANDLE_OUT, c_size_t, c_uint)),
    "host_free": ("hipHostFree", "cuMemFreeHost", (c_void_p,)),
    "host_register": ("hipHostRegister", "cuMemHostRegister_v2", (c_void_p, c_size_t, c_uint)),
    "host_unregister": ("hipHostUnregister", "cuMemHostUnregister", (c_void_p,)),
    "host_device_pointer": (
        "hipHostGetDevicePointer",
        "cuMemHostGetDevicePointer_v2",
        (_HANDLE_OUT, c_void_p, c_uint),
    ),
    # work
    "copy_in": ("hipMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", _COPY),
    "copy_out": ("hipMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", _COPY),
    "copy_within": ("hipMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", _COPY),
    "fill": ("hipMemsetD8Async", "cuMemsetD8Async", (c_void_p, c_ubyte, c_size_t, c_void_p)),
    # streams and events
    "priority_range": (
        "hipDeviceGetStreamPriorityRange",
        "cuCtxGetStreamPriorityRange",
        (_INT_OUT, _INT_OUT),
    ),
    "stream_create": (
        "hipStreamCreateWithPriority",
        "cuStreamCreateWithPriority",
        (_HANDLE_OUT, c_uint, c_int),
    ),
    "stream_destroy": ("hipStreamDestroy", "cuStreamDestroy_v2", (c_void_p,)),
    "stream_synchronize": ("hipStreamSynchronize", "cuStreamSynchronize", (c_void_p,)),
    "stream_query": ("hipStreamQuery", "cuStreamQuery", (c_void_p,)),
    "stream_wait_event": ("hipStreamWaitEvent", "cuStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
    "event_create": ("hipEventCreateWithFlags", "cuEventCreate", (_HANDLE_OUT, c_uint)),
    "event_destroy": ("hipEventDestroy", "cuEventDestroy_v2", (c_void_p,)),
    "event_record": ("hipEventRecord", "cuEventRecord", (c_void_p, c_void_p)),
    "capture_begin": ("hipStreamBeginCapture", "cuStreamBeginCapture_v2", (c_void_p, c_int)),
    "capture_end": ("hipStreamEndCapture", "cuStreamEndCapture", (c_void_p, POINTER(c_void_p))),
    "graph_instantiate": (
        "hipGraphInstantiateWithFlags",
        "cuGraphInstantiateWithFlags",
        (POINTER(c_void_p), c_void_p, c_ulonglong),
    ),
    "graph_launch": ("hipGraphLaunch", "cuGraphLaunch", (c_void_p, c_void_p)),
    "graph_exec_destroy": ("hipGraphExecDestroy", "cuGraphExecDestroy", (c_void_p,)),
    "graph_destroy": ("hipGraphDestroy", "cuGraphDestroy", (c_void_p,)),
    "event_query": ("hipEventQuery", "cuEventQuery", (c_void_p,)),
    "event_synchronize": ("hipEventSynchronize", "cuEventSynchronize", (c_void_p,)),
    # kernels
    "module_load": ("hipModuleLoadData", "cuModuleLoadData", (_HANDLE_OUT, c_void_p)),
    "module_unload": ("hipModuleUnload", "cuModuleUnload", (c_void_p,)),
    "module_function": (
        "hipModuleGetFunction",
        "cuModuleGetFunction",
        (_HANDLE_OUT, c_void_p, c_char_p),
    ),
    "launch": (
        "hipModuleLaunchKernel",
        "cuLaunchKernel",
        (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    ),
    # virtual memory
    "granularity": (
        "hipMemGetAllocationGranularity",
        "cuMemGetAllocationGranularity",
        (_SIZE_OUT, POINTER(AllocationProperties), c_int),
    ),
    "reserve": (
        "hipMemAddressReserve",
        "cuMemAddressReserve",
        (_HANDLE_OUT, c_size_t, c_size_t, c_void_p, c_ulonglong),
    ),
    "unreserve": ("hipMemAddressFree", "cuMemAddressFree", (c_void_p, c_size_t)),
    "create": (
        "hipMemCreate",
        "cuMemCreate",
        (_HANDLE_OUT, c_size_t, POINTER(AllocationProperties), c_ulonglong),
    ),
    "release": ("hipMemRelease", "cuMemRelease", (c_void_p,)),
    "map": ("hipMemMap", "cuMemMap", (c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong)),
    "unmap": ("hipMemUnmap", "cuMemUnmap", (c_void_p, c_size_t)),
    "set_access": (
        "hipMemSetAccess",
        "cuMemSetAccess",
        (c_void_p, c_size_t, POINTER(AccessDescriptor), c_size_t),
    ),
}
"""The calls that both vendors have, by the name that we use."""

HIP_CALLS: dict[str, tuple[str, ArgTypes]] = {
    "set_device": ("hipSetDevice", (c_int,)),
    "get_device": ("hipGetDevice", (_INT_OUT,)),
    "properties": ("hipGetDevicePropertiesR0600", (c_void_p, c_int)),
}
"""Calls that only HIP has in this form."""

CUDA_CALLS: dict[str, tuple[str, ArgTypes]] = {
    "context_retain": ("cuDevicePrimaryCtxRetain", (_HANDLE_OUT, c_int)),
    "context_release": ("cuDevicePrimaryCtxRelease_v2", (c_int,)),
    "context_set": ("cuCtxSetCurrent", (c_void_p,)),
    "context_get": ("cuCtxGetCurrent", (_HANDLE_OUT,)),
    "graph_exec_update": ("cuGraphExecUpdate_v2", (c_void_p, c_void_p, c_void_p)),
}
"""Calls that only CUDA has in this form."""

SHORT_CALLS = {"context_get", "context_set", "get_device", "set_device"}
"""Calls before and after every other call. They never wait, so Python keeps its lock: releasing it would cost more."""

COMPILER_CALLS: dict[str, ArgTypes] = {
    "Version": (_INT_OUT, _INT_OUT),
    "CreateProgram": (_HANDLE_OUT, c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p)),
    "DestroyProgram": (_HANDLE_OUT,),
    "CompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "GetProgramLogSize": (c_void_p, _SIZE_OUT),
    "GetProgramLog": (c_void_p, c_char_p),
}
"""The calls of hiprtc and nvrtc, without their prefix."""

COMPILER_CODE_CALLS: tuple[tuple[str, str], tuple[str, str]] = (
    ("GetCodeSize", "GetCode"),
    ("GetCUBINSize", "GetCUBIN"),
)
"""For HIP's and for CUDA's compiler: the names of the calls that return the size of the machine code, and the code."""


def bind(library: ctypes.CDLL, symbol: str, arguments: ArgTypes) -> Any | None:
    """Return a library's function with its types set; None where the library does not have it."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        return None
    function.argtypes = arguments
    function.restype = c_int
    return function


def keeping_lock(function: Any) -> Callable[..., int]:
    """Return a version of a bound function that keeps Python's lock during the call."""
    address = ctypes.cast(function, c_void_p).value
    assert address is not None, function
    made: Callable[..., int] = ctypes.PYFUNCTYPE(c_int, *function.argtypes)(address)
    return made
