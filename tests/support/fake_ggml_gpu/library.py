"""Compiles the fake GPUs, loads them into an engine, and sets and reads what they can be asked for."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import count, takewhile
from pathlib import Path

from engine_runs.native_build import build_library
from expertier.added_flags import CPP_VARIABLE, added_flags
from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.llama_cpp import LoadedEngine

_SOURCES = Path(__file__).parent
_KERNELS = ("expertier.hip.fake", "expertier.hip.kernels")
_CALLS = ("memory", "pinned", "stream", "event", "capture", "instantiate")  # Call of driver/state.h
_N_LOOKUP_WORDS = 17  # of fake_gpu_open_device_lookup, more than an older expertier_device_lookup
_FAULTS_BYTES = 1 << 16


def build_fake_gpu() -> Path:
    """Return the library for the pinned engine, compiled the first time and kept in the cache folder."""
    return build_library(
        "fake_ggml_gpu",
        sorted(_SOURCES.rglob("*.cpp")),
        includes=[_SOURCES, *(Path(str(files(package))) for package in _KERNELS)],
        flags=("-O1", *_flags_of_sanitizer()),
        # No symbol of ours may be found in place of another library's, and none of theirs in place of ours.
        link_flags=("-Wl,-Bsymbolic",),
    )


def _flags_of_sanitizer() -> tuple[str, ...]:
    """With ThreadSanitizer, volatile accesses are told apart: driver/thread_sanitizer.cpp says what they are."""
    return ("--param=tsan-distinguish-volatile=1",) * ("-fsanitize=thread" in added_flags(CPP_VARIABLE))


class FakeGpu:
    """One device."""

    def __init__(self, library: ct.CDLL, index: int) -> None:
        self._library = library
        self._index = index
        self.name = f"FAKE{index}"

    def counters(self) -> dict[str, int]:
        """Every counter of driver/state.h by name."""
        names = list(takewhile(bool, map(self._library.fake_gpu_counter_name, count())))
        values = (ct.c_int64 * len(names))()
        self._library.fake_gpu_counters(self._index, values)
        return {name.decode(): value for name, value in zip(names, values, strict=True)}

    def live(self) -> dict[str, int]:
        """What has not been given back, without what is zero."""
        return {name: n for name, n in self.counters().items() if name.startswith("live_") and n}

    def set_memory(self, n_bytes: int) -> None:
        """Have the device so much memory, whatever is used already."""
        self._library.fake_gpu_set_memory(self._index, n_bytes)


class FakeGpus:
    """The devices of this process: FAKE0, FAKE1, ... in the order of `devices`."""

    def __init__(self, library: ct.CDLL, n_devices: int) -> None:
        self._library = library
        self.devices = tuple(FakeGpu(library, index) for index in range(n_devices))

    @classmethod
    def load(
        cls, engine: LoadedEngine, path: Path, *, n_devices: int = 1, memory_bytes: int = 1 << 30
    ) -> FakeGpus:
        """Register `n_devices` of `memory_bytes` each in the engine; once a process, and before its proxy is loaded."""
        assert "proxy" not in vars(engine), "the proxy wraps the devices that there are when it is loaded"
        library = ct.CDLL(str(path))
        library.fake_gpu_configure.argtypes = (ct.c_int32, ct.c_int64)
        library.fake_gpu_set_memory.argtypes = (ct.c_int32, ct.c_int64)
        library.fake_gpu_switch.argtypes = (ct.c_char_p, ct.c_int64)
        library.fake_gpu_counter_name.restype = ct.c_char_p
        library.fake_gpu_counters.argtypes = (ct.c_int32, ct.POINTER(ct.c_int64))
        library.fake_gpu_fail.argtypes = (ct.c_int32, ct.c_int64)
        library.fake_gpu_open_device_lookup.argtypes = (ct.c_int32, ct.c_void_p)
        library.fake_gpu_close_device_lookup.argtypes = (ct.c_void_p,)
        library.fake_gpu_is_armed.argtypes = (ct.c_int32,)
        library.fake_gpu_take_faults.argtypes = (ct.c_char_p, ct.c_size_t)
        library.fake_gpu_configure(n_devices, memory_bytes)
        registered = engine.symbol("ggml_backend_load", ct.c_void_p, ct.c_char_p)(str(path).encode())
        assert registered, f"ggml refused {path}"
        return cls(library, n_devices)

    def switch(self, **values: int) -> None:
        """Set switches of driver/state.h."""
        for name, value in values.items():
            if not self._library.fake_gpu_switch(name.encode(), value):
                raise KeyError(name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all streams from taking work inside the block."""
        self.switch(held=1)
        try:
            yield
        finally:
            self.switch(held=0)

    def fail(self, call: str, nth: int = 1) -> None:
        """Have the `nth` call from now on fail, once, on any device: one of _CALLS."""
        self._library.fake_gpu_fail(_CALLS.index(call), nth)

    def is_armed(self, call: str) -> bool:
        """Whether the call that `fail` chose is still to come."""
        return bool(self._library.fake_gpu_is_armed(_CALLS.index(call)))

    @contextmanager
    def device_lookup(self, device: int = 0) -> Iterator[abi.DeviceLookup]:
        """What a device look-up of decode graphs needs of a device's driver; nothing of it may be queued at the end."""
        calls = abi.DeviceLookup()
        with self.driver_calls(device) as given:
            ct.memmove(ct.byref(calls), given, min(ct.sizeof(calls), ct.sizeof(given)))
            yield calls

    @contextmanager
    def driver_calls(self, device: int = 0) -> Iterator[ct.Array[ct.c_void_p]]:
        """What fake_gpu_open_device_lookup gives: addresses of driver calls and kernels, a new stream at index 4."""
        given = (ct.c_void_p * _N_LOOKUP_WORDS)()
        self._library.fake_gpu_open_device_lookup(device, given)
        stream = given[4]
        try:
            yield given
        finally:
            self._library.fake_gpu_close_device_lookup(stream)

    def synchronize(self) -> None:
        """Wait until everything that is queued now is done."""
        self._library.fake_gpu_synchronize()

    def reset(self) -> None:
        """Set every switch as it was, and have no call fail."""
        self._library.fake_gpu_reset()

    def take_faults(self) -> str:
        """Return and clear what the devices complained of, a line each."""
        text = ct.create_string_buffer(_FAULTS_BYTES)
        self._library.fake_gpu_take_faults(text, len(text))
        return text.value.decode(errors="replace")
