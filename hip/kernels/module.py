"""Kernels that are loaded on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.ownership import Owned
from expertier.hip.driver.stream_handle import StreamLike, stream_handle


class KernelModule(Owned):
    """Machine code on a GPU, in which kernels are found by name."""

    def __init__(self, gpu: Gpu, code: bytes) -> None:
        """Load `code` on the GPU. Raises `DriverError`."""
        self.gpu = gpu
        self._code = ctypes.create_string_buffer(code, len(code))
        self._handle = gpu.handle("module_load", ctypes.addressof(self._code))
        self._closed = False

    def function(self, name: str) -> Kernel:
        """Return the kernel of a name. Raises `DriverError` where the code has no such kernel."""
        return Kernel(self.gpu, self.gpu.handle("module_function", self._handle, name.encode()))

    def _release(self) -> None:
        self.gpu.call("module_unload", self._handle)

    def __repr__(self) -> str:
        """Name the module for a message."""
        return f"KernelModule({self.gpu.name}, {len(self._code)} bytes)"


class Kernel:
    """A kernel of a loaded module."""

    def __init__(self, gpu: Gpu, handle: int) -> None:
        """Take the function's handle."""
        self._gpu = gpu
        self.handle = handle

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Any],
        stream: StreamLike = 0,
    ) -> None:
        """Queue a launch of a grid of blocks with `threads` threads each; `arguments` are ctypes values.

        Raises `DriverError`.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self._gpu.call(
            "launch",
            self.handle,
            grid[0],
            grid[1],
            1,
            threads,
            1,
            1,
            0,
            stream_handle(stream),
            pointers,
            None,
        )
