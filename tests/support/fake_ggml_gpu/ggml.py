"""The few calls of ggml's own that the tests of the fake devices make, by the names that ggml gives them."""

from __future__ import annotations

import ctypes as ct
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.llama_cpp import LoadedEngine

F32 = 0  # GGML_TYPE_F32
SUCCESS, FAILED = 0, -1  # ggml_status

_P, _S = ct.c_void_p, ct.c_size_t
_CONTEXT_BYTES = 1 << 18


class _InitParams(ct.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ct.c_size_t), ("mem_buffer", ct.c_void_p), ("no_alloc", ct.c_bool))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (_InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (_S, ()),
    "ggml_get_data": (_P, (_P,)),
    "ggml_new_tensor_1d": (_P, (_P, ct.c_int, ct.c_int64)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_dev_by_name": (_P, (ct.c_char_p,)),
    "ggml_backend_dev_init": (_P, (_P, ct.c_char_p)),
    "ggml_backend_dev_memory": (None, (_P, ct.POINTER(_S), ct.POINTER(_S))),
    "ggml_backend_dev_buffer_type": (_P, (_P,)),
    "ggml_backend_dev_host_buffer_type": (_P, (_P,)),
    "ggml_backend_dev_supports_buft": (ct.c_bool, (_P, _P)),
    "ggml_backend_buft_is_host": (ct.c_bool, (_P,)),
    "ggml_backend_buft_alloc_buffer": (_P, (_P, _S)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_get_base": (_P, (_P,)),
    "ggml_backend_buffer_get_type": (_P, (_P,)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, _S, _S)),
    "ggml_backend_tensor_get": (None, (_P, _P, _S, _S)),
    "ggml_backend_tensor_copy": (None, (_P, _P)),
    "ggml_backend_tensor_set_async": (None, (_P, _P, _P, _S, _S)),
    "ggml_backend_tensor_get_async": (None, (_P, _P, _P, _S, _S)),
    "ggml_backend_tensor_copy_async": (None, (_P, _P, _P, _P)),
    "ggml_backend_graph_compute_async": (ct.c_int, (_P, _P)),
    "ggml_backend_synchronize": (None, (_P,)),
    "ggml_backend_event_new": (_P, (_P,)),
    "ggml_backend_event_free": (None, (_P,)),
    "ggml_backend_event_record": (None, (_P, _P)),
    "ggml_backend_event_wait": (None, (_P, _P)),
    "ggml_backend_event_synchronize": (None, (_P,)),
}


class Ggml:
    """ggml's functions without their prefix, and what a test has to free at its end."""

    def __init__(self, engine: LoadedEngine) -> None:
        self._engine = engine
        self._to_free: list[tuple[Any, int]] = []

    def __getattr__(self, name: str) -> Any:
        full = next(full for full in (f"ggml_{name}", f"ggml_backend_{name}") if full in _FUNCTIONS)
        result, arguments = _FUNCTIONS[full]
        return self._engine.symbol(full, result, *arguments)

    def device(self, name: str) -> int:
        """The device of this name."""
        found: int = self.dev_by_name(name.encode())
        assert found, name
        return found

    def stream(self, name: str) -> int:
        """A new backend, which is a stream, of a device."""
        free = self._engine.symbol("ggml_backend_free", None, ct.c_void_p)  # its short name is a context's
        return self._keep(self.dev_init(self.device(name), None), free)

    def event(self, name: str) -> int:
        """A new event of a device."""
        return self._keep(self.event_new(self.device(name)), self.event_free)

    def context(self) -> int:
        """A new context for tensors without memory."""
        params = _InitParams(_CONTEXT_BYTES, None, True)
        return self._keep(self.init(params), self.free)

    def allocate(self, context: int, device: str) -> None:
        """Give a context's tensors memory of a device."""
        kind = self.dev_buffer_type(self.device(device))
        self._keep(self.alloc_ctx_tensors_from_buft(context, kind), self.buffer_free)

    def vectors(self, device: str, n: int, size: int) -> list[int]:
        """`n` tensors of `size` floats in memory of a device."""
        context = self.context()
        made = [self.new_tensor_1d(context, F32, size) for _ in range(n)]
        self.allocate(context, device)
        return made

    def pinned(self, size: int) -> npt.NDArray[np.float32]:
        """`size` floats of pinned memory."""
        host = self.dev_host_buffer_type(self.device("FAKE0"))
        buffer = self._keep(self.buft_alloc_buffer(host, size * 4), self.buffer_free)
        assert self.buffer_get_type(buffer) == host
        memory = (ct.c_float * size).from_address(self.buffer_get_base(buffer))
        return np.frombuffer(memory, np.float32)

    def memory(self, name: str) -> tuple[int, int]:
        """What a device says of its memory: free and total bytes."""
        free, total = ct.c_size_t(), ct.c_size_t()
        self.dev_memory(self.device(name), ct.byref(free), ct.byref(total))
        return free.value, total.value

    def free_last(self, made: int | None = None) -> None:
        """Free what was made last, or `made`, before the end."""
        entry = next(entry for entry in reversed(self._to_free) if made in (None, entry[1]))
        self._to_free.remove(entry)
        entry[0](entry[1])

    def _keep(self, made: int | None, free: Any) -> int:
        assert made
        self._to_free.append((free, made))
        return made

    def __enter__(self) -> Ggml:
        return self

    def __exit__(self, *_: object) -> None:
        while self._to_free:
            free, made = self._to_free.pop()
            free(made)
