"""How fast a device copies: from pinned memory over its link, between slots, and a few ids back to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from expertier.hip.device import Device
from expertier.units import MIB

_BYTES = 64 * MIB
_PIECE = 2 * MIB
_ROUNDS = 7
_IDS_BYTES = 256


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Bytes a second, and seconds for reading some ids back; on the host device nothing crosses a link (None)."""

    link: float | None
    between_slots: float
    read_back_s: float | None


def measure_device(device: Device) -> DeviceRates:
    """Measure; takes 128 MiB of the device and 64 of pinned memory meanwhile. Raises `DeviceError`."""
    half = device.alloc(2 * _BYTES)
    try:
        order = np.random.default_rng(0).permutation(_BYTES // _PIECE)
        moves = np.array(
            [(half + _BYTES + i * _PIECE, half + int(j) * _PIECE, _PIECE) for i, j in enumerate(order)],
            np.int64,
        )

        def gather() -> None:
            device.copy_within(moves)
            device.synchronize()

        between = _BYTES / _seconds(gather)
        if not device.has_streams:
            return DeviceRates(None, between, None)
        pinned = device.alloc_pinned(_BYTES)
        try:

            def fill() -> None:
                for place in range(0, _BYTES, _PIECE):
                    device.copy_in(half + place, pinned + place, _PIECE)
                device.synchronize()

            def read_back() -> None:
                device.copy_out(pinned, half, _IDS_BYTES)
                device.synchronize()

            return DeviceRates(_BYTES / _seconds(fill), between, _seconds(read_back))
        finally:
            device.free(pinned)
    finally:
        device.free(half)


def _seconds(work: Callable[[], None]) -> float:
    """Return the median time of some calls, after one call that is not counted."""
    work()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(median(times), 1e-9)
