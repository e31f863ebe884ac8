"""The plugin's C functions that open tiers call, in Python: devices of any number and size, without an engine."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.hip.host import HostDevice

_ANY_MEMORY_DOES = -1  # what the plugin answers for pinned memory of a device without a buffer type for it


class FakeProxy:
    """Stands for the loaded plugin, at its C interface. Device memory is memory of this process, and is counted.

    `free_bytes` has the free memory of each GPU by the engine's name for it, such as CUDA0; the CPU is always there.
    """

    def __init__(self, free_bytes: Mapping[str, int]) -> None:
        self._free = {name.encode(): n_bytes for name, n_bytes in free_bytes.items()}
        self._memory = HostDevice()
        self._live: dict[int, tuple[bytes, int]] = {}

    def expertier_proxy_device_name(self, number: int) -> bytes | None:
        names = [*self._free, b"CPU"]
        return names[number] if number < len(names) else None

    def expertier_device_is_host(self, name: bytes) -> int:
        return -1 if name != b"CPU" and name not in self._free else int(name == b"CPU")

    def expertier_proxy_can_wrap(self) -> int:
        return 1

    def expertier_device_memory(self, name: bytes, free: Any, total: Any) -> int:
        taken = sum(n_bytes for owner, n_bytes in self._live.values() if owner == name)
        free._obj.value, total._obj.value = self._free[name] - taken, self._free[name]
        return 1

    def expertier_memory_alloc(self, name: bytes, is_pinned: int, n_bytes: int) -> int:
        if is_pinned:
            return _ANY_MEMORY_DOES
        taken = sum(n_bytes for owner, n_bytes in self._live.values() if owner == name)
        if taken + n_bytes > self._free[name]:
            return 0
        address = self._memory.alloc(n_bytes)
        self._live[address] = (name, n_bytes)
        return address

    def expertier_memory_free(self, address: int) -> int:
        if self._live.pop(address, None) is None:
            return 0
        self._memory.free(address)
        return 1

    def expertier_memory_copy_in(self, target: int, source: int, n_bytes: int) -> int:
        ct.memmove(target, source, n_bytes)
        return 1

    def expertier_memory_copy_out(self, target: int, source: int, n_bytes: int) -> int:
        ct.memmove(target, source, n_bytes)
        return 1

    def expertier_memory_zero(self, target: int, n_bytes: int) -> int:
        ct.memset(target, 0, n_bytes)
        return 1

    def expertier_memory_relocate(
        self, _slab: int, moves: int, n_moves: int, pieces: int, n_pieces: int
    ) -> int:
        for target, source, n_bytes in _rows(moves, n_moves, 3).tolist():
            ct.memmove(target, source, n_bytes)
        for address, n_bytes in _rows(pieces, n_pieces, 2).tolist():
            ct.memset(address, 0, n_bytes)
        return 1

    def expertier_memory_finish(self, _slab: int) -> int:
        return 1

    def close(self) -> None:
        """Raise `DeviceError` where something is still allocated."""
        self._memory.close()


def _rows(address: int, n_rows: int, columns: int) -> npt.NDArray[np.int64]:
    if not n_rows:
        return np.empty((0, columns), np.int64)
    numbers = (ct.c_int64 * (n_rows * columns)).from_address(address)
    return np.ctypeslib.as_array(numbers).reshape(n_rows, columns).copy()
