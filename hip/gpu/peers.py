"""GPUs that reach each other's memory, and copies between those that do not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import permutations

from expertier.errors import DriverError
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import PinnedBuffer
from expertier.hip.driver.runtime import Event, Stream
from expertier.hip.gpu.device import GpuDevice
from expertier.units import MIB

_log = logging.getLogger(__name__)

_BOUNCE_BYTES = 8 * MIB


class PeerLinks:
    """Which of some GPUs of one driver reach each other's memory; made once, after the devices are open.

    Plain allocations are reachable from then on. A virtual range grants its own mappings: give it `peers_of`.
    """

    def __init__(self, devices: Sequence[GpuDevice]) -> None:
        """Ask for access in both directions of each pair; pairs without it are logged, not an error."""
        self._links: set[tuple[Gpu, Gpu]] = set()
        self._gpus = [device.gpu for device in devices]
        for one, other in permutations(self._gpus, 2):
            try:
                if one.can_access(other):
                    one.allow_peer(other)
                    self._links.add((one, other))
                    continue
                reason = "the driver says that it cannot"
            except DriverError as error:
                reason = str(error)
            _log.warning("%s does not reach the memory of %s (%s)", one.name, other.name, reason)

    def linked(self, one: GpuDevice, other: GpuDevice) -> bool:
        """Whether `one` reaches the memory of `other`."""
        return (one.gpu, other.gpu) in self._links

    def peers_of(self, owner: GpuDevice) -> list[Gpu]:
        """Return the GPUs that reach the memory of `owner`."""
        return [gpu for gpu in self._gpus if (gpu, owner.gpu) in self._links]

    def copy(
        self, target_device: GpuDevice, target: int, source_device: GpuDevice, source: int, n_bytes: int
    ) -> None:
        """Copy between two GPUs, through pinned memory where they are not linked; done when it returns.

        Work that writes the source or uses the target must be done before. Raises `DriverError`.
        """
        with Stream(target_device.gpu) as stream:
            if self.linked(target_device, source_device):
                target_device.gpu.call("copy_within", target, source, n_bytes, stream.handle)
                stream.synchronize()
            else:
                self._copy_in_two_hops(target_device.gpu, target, source_device.gpu, source, n_bytes, stream)

    def _copy_in_two_hops(
        self, target_gpu: Gpu, target: int, source_gpu: Gpu, source: int, n_bytes: int, inward: Stream
    ) -> None:
        half = min(_BOUNCE_BYTES, n_bytes)
        with (
            PinnedBuffer(target_gpu, 2 * half) as bounce,
            Stream(source_gpu) as outward,
            Event(target_gpu) as first,
            Event(target_gpu) as second,
        ):
            for i, begin in enumerate(range(0, n_bytes, half)):
                size = min(half, n_bytes - begin)
                place, free = bounce.address + i % 2 * half, (first, second)[i % 2]
                free.synchronize()
                source_gpu.call("copy_out", place, source + begin, size, outward.handle)
                outward.synchronize()
                target_gpu.call("copy_in", target + begin, place, size, inward.handle)
                free.record(inward)
            inward.synchronize()
