"""One GPU of a driver. Its calls are made with the GPU current in the calling thread."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref
from typing import Any, TypeVar

from expertier.errors import DeviceError, DriverError
from expertier.hip.driver.codes import Code
from expertier.hip.driver.driver import Driver
from expertier.hip.driver.structs import device_memory
from expertier.hip.driver.vendor import Vendor
from expertier.units import mib

_R = TypeVar("_R")

_NAME_BYTES = 256
_PROPERTIES_BYTES = 8192  # hipDeviceProp_t has 1472 from 6.0 on; later versions may append fields
_ARCHITECTURE_OFFSET = 1160
_CUDA_MAJOR, _CUDA_MINOR = 75, 76  # the attributes of the compute capability
HOST_FLAGS = 0x1 | 0x2
"""Of pinned memory: portable (pinned for every GPU) and mapped (kernels may read it)."""
_BLOCKED_EVENT = 0x2  # an event that takes no time stamps


class Gpu:
    """A GPU by its number, with the driver calls on it. Thread-safe.

    Each call makes the GPU current in the calling thread, and makes the thread's earlier choice current again
    afterwards, because an engine's thread may be working on another GPU.
    """

    _closed = True  # until the constructor has a context to give back

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Check that the GPU exists and the driver is new enough, and take the GPU's context. Raises `DeviceError`."""
        self.driver = driver
        self.ordinal = ordinal
        count = driver.device_count()
        if not 0 <= ordinal < count:
            raise DeviceError(
                f"asked for {driver.vendor}:{ordinal}: {driver.path} has {count} devices, numbered from 0"
            )
        self.version = driver.version()
        if self.version < driver.traits.oldest_version:
            raise DeviceError(
                f"{driver.path} is version {driver.traits.version_text(self.version)}; the oldest that works "
                f"is {driver.traits.version_text(driver.traits.oldest_version)}: install a newer driver"
            )
        is_cuda = driver.vendor is Vendor.CUDA
        self._context = driver.handle("context_retain", ordinal) if is_cuda else 0
        self._wanted = self._context if is_cuda else ordinal
        self._names_of_current = ("context_get", "context_set") if is_cuda else ("get_device", "set_device")
        self._make_current: Callable[[], Any] = ctypes.c_void_p if is_cuda else ctypes.c_int
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the context was given back; the last to do that ends it."""
        return self._closed

    @property
    def name(self) -> str:
        """The name under which `open_device` opens the GPU, such as `hip:0`."""
        return f"{self.driver.vendor}:{self.ordinal}"

    # -- calls with this GPU current ------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call. Raises `DriverError` for any code except success."""
        before = self._enter()
        try:
            self.driver.call(name, *arguments)
        finally:
            self._leave(before)

    def ask(self, name: str, *arguments: Any) -> bool:
        """Make a call that tells whether work is done; see `Driver.ask`."""
        before = self._enter()
        try:
            return self.driver.ask(name, *arguments)
        finally:
            self._leave(before)

    def handle(self, name: str, *arguments: Any) -> int:
        """Make a call whose first argument receives a handle or an address, and return it."""
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def take_memory(self, name: str, n_bytes: int, *arguments: Any, what: str) -> int:
        """Make a call that returns memory or a handle to it. Raises `DriverError` with the bytes asked for and free."""
        try:
            return self.handle(name, n_bytes, *arguments)
        except DriverError as error:
            raise self.explain(error, f"asked {self.name} for {mib(n_bytes)} of {what}") from error

    def explain(self, error: DriverError, doing: str) -> DriverError:
        """Return `error` with a message that also says what was being done and how much memory is free."""
        try:
            free, total = self.memory()
            state = f"{mib(free)} of {mib(total)} are free on the GPU"
        except DriverError as second:
            state = f"its free memory cannot be read either ({second})"
        advice = "; lower the budgets or free memory" if error.code == Code.OUT_OF_MEMORY else ""
        return DriverError(f"{doing}: {error}; {state}{advice}", call=error.call, code=error.code)

    def within(self, function: Callable[..., _R], *arguments: Any) -> _R:
        """Call `function`, which makes driver calls by itself, with the GPU current, and return its result."""
        before = self._enter()
        try:
            return function(*arguments)
        finally:
            self._leave(before)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Keep the GPU current for the length of a `with` block, for driver calls that go past this object."""
        before = self._enter()
        try:
            yield
        finally:
            self._leave(before)

    # -- properties of the GPU ------------------------------------------------------------------------------

    def product(self) -> str:
        """Return the vendor's name for the GPU."""
        buffer = ctypes.create_string_buffer(_NAME_BYTES)
        self.driver.call("device_name", buffer, _NAME_BYTES, self.ordinal)
        return buffer.value.decode(errors="replace")

    def architecture(self) -> str:
        """Return the runtime compiler's name for the GPU's architecture: `gfx906:sramecc+:xnack-` or `sm_90`."""
        if self.driver.vendor is Vendor.CUDA:
            return f"sm_{self.attribute(_CUDA_MAJOR)}{self.attribute(_CUDA_MINOR)}"
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self.driver.call("properties", properties, self.ordinal)
        return ctypes.string_at(ctypes.addressof(properties) + _ARCHITECTURE_OFFSET).decode(errors="replace")

    def attribute(self, number: int) -> int:
        """Return a device attribute by the vendor's number."""
        return self.driver.integer("attribute", number, self.ordinal)

    def memory(self) -> tuple[int, int]:
        """Return (free bytes, all bytes) of device memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("memory_info", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def granularity(self) -> int:
        """Return the granularity of virtual memory in bytes, as the driver reports it."""
        out = ctypes.c_size_t()
        self.call("granularity", ctypes.byref(out), ctypes.byref(device_memory(self.ordinal)), 0)
        return out.value

    # -- calls that several classes need ---------------------------------------------------------------------

    def host_alloc(self, n_bytes: int) -> int:
        """Return new host memory, pinned for all GPUs of the driver. Raises `DriverError`; it is never pageable."""
        return self.take_memory("host_alloc", n_bytes, HOST_FLAGS, what="pinned host memory")

    def new_event(self) -> int:
        """Return a new event, which takes no time stamps."""
        return self.handle("event_create", _BLOCKED_EVENT)

    def synchronize(self) -> None:
        """Wait for all work of the GPU."""
        self.call("synchronize")

    def close(self) -> None:
        """Give the context back; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if self.driver.vendor is Vendor.CUDA:
                self.driver.call("context_release", self.ordinal)

    def __del__(self) -> None:
        """Give the context back where `close` was not called. Memory and streams left on the GPU warn by themselves."""
        if not self._closed and not sys.is_finalizing():
            with suppress(DriverError):
                self.close()

    def _enter(self) -> int | None:
        """Make the GPU current; return what was current before, or None where it was the same."""
        names = self._names_of_current
        out = self._make_current()
        code = self.driver.raw(names[0], byref(out))
        if code:
            raise self.driver.error(names[0], code)
        before = out.value or 0
        if before == self._wanted:
            return None
        self.driver.call(names[1], self._wanted)
        return before

    def _leave(self, before: int | None) -> None:
        if before is not None:
            self.driver.raw(self._names_of_current[1], before)
