"""What the machine knows of the tiers: no more than a user could."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from expertier.errors import DeviceError, SourceError
from expertier.tiers.access.lease import ExpertGroup, Lease
from expertier.tiers.shared.stats import TierStats

I32 = npt.NDArray[np.int32]
ExpertKey: TypeAlias = tuple[int, int]
"""(layer, expert)"""

ERRORS: dict[str, type[Exception]] = {
    "read": SourceError,
    "verify": SourceError,
    "copy_in": DeviceError,
    "copy_within": DeviceError,
    "zero": DeviceError,
    "alloc_pinned": DeviceError,
    "create_event": DeviceError,
    "record_event": DeviceError,
    "stream_wait_event": DeviceError,
}
"""The operations that can be made to fail, and how they fail by themselves."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The `nth` call of an operation from now fails, by itself or with another error than its own."""

    operation: str
    nth: int
    error: type[BaseException] | None = None

    @property
    def raises(self) -> type[BaseException]:
        """The error's type."""
        return self.error or ERRORS[self.operation]


@dataclass(eq=False, slots=True)
class Held:
    """A lease: the experts that it was asked for, its stream, and the group that it holds: expert → slot."""

    lease: Lease
    wanted: set[int]
    stream: int | None
    group: dict[int, int]

    @property
    def layer(self) -> int:
        """The lease's layer."""
        return self.lease.layer


@dataclass(eq=False, slots=True)
class EngineCall:
    """An engine's call: its experts' slots, whether its misses are still to be filled, and whom they evicted."""

    layer: int
    experts: I32
    slots: I32
    missing: I32
    filled: bool
    evicted: set[ExpertKey] = field(default_factory=set)

    @property
    def group(self) -> dict[int, int]:
        """Expert → slot."""
        return dict(zip(self.experts.tolist(), self.slots.tolist(), strict=True))


@dataclass(eq=False, slots=True)
class Region:
    """The compute region: what is reserved, who may write to it, and what was written.

    `pays_at` are the bytes missed from which on the boundary goes down by itself (None: nothing is to be given
    back), `writable` the bytes that each stream may write (None as the stream: all may), `writers` the streams
    with writes that may still be queued, and `written` the (bytes, value) that lie at the base.
    """

    wanted_bytes: int = 0
    pays_at: int | None = None
    writable: dict[int | None, int] = field(default_factory=dict)
    writers: set[int | None] = field(default_factory=set)
    written: tuple[int, int] | None = None
    n_writes: int = 0
    n_moves: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What can be seen of the tiers at one moment."""

    residents: tuple[dict[int, int], ...]
    """Of each layer: expert → slot."""
    ranks: tuple[dict[int, int], ...]
    """Of each layer: expert → who leaves first, lowest first."""
    copies: tuple[ExpertKey, ...]
    """What the host pool has complete, oldest first."""
    slots: tuple[int, ...]
    stats: TierStats

    def gone_until(self, later: View) -> set[ExpertKey]:
        """Return the experts that have left L1 until `later`."""
        return {
            (layer, expert)
            for layer, residents in enumerate(self.residents)
            for expert in residents
            if expert not in later.residents[layer]
        }


def slots_of(group: ExpertGroup | None) -> dict[int, int]:
    """Return expert → slot of a group."""
    if group is None:
        return {}
    return dict(zip(group.experts.tolist(), group.slots.tolist(), strict=True))
