"""What the machine knows about the tiers, which is no more than a user could know."""

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
    """The `nth` call of an operation from now on fails, with the operation's own error or with another one."""

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
    """An engine's call: its experts' slots, whether its misses still have to be filled, and the evicted experts."""

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
    """The compute region: the reserved bytes, the streams that may write to it, and what was written.

    The boundary goes down by itself once `pays_at` bytes were missed (None: nothing is to be given back). `writable`
    are the bytes that each stream may write (None as the stream: all streams may). `writers` are the streams whose
    writes may still be queued. `written` is the (bytes, value) that was written at the base.
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
    """The state of the tiers at one moment, as far as it can be seen."""

    residents: tuple[dict[int, int], ...]
    """For each layer: expert → slot."""
    ranks: tuple[dict[int, int], ...]
    """For each layer: expert → rank in the order of eviction; the lowest leaves first."""
    copies: tuple[ExpertKey, ...]
    """The host pool's complete copies, oldest first."""
    slots: tuple[int, ...]
    stats: TierStats

    def gone_until(self, later: View) -> set[ExpertKey]:
        """Return the experts that have left L1 between this view and `later`."""
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
