"""A lease: experts that stay in their slots until the lease is released."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from expertier.errors import LeaseError
from expertier.hip.gpu.cupy_interop import slots_as_cupy
from expertier.interrupts import interrupts_deferred, not_interrupted_at_entry
from expertier.tiers.model.matrix import Role

I32 = npt.NDArray[np.int32]


class ExpertGroup(NamedTuple):
    """Experts that are in slots at the same time: `experts[i]` is in `slots[i]`.

    Both are int32 arrays of the same length, without duplicates.
    """

    experts: I32
    slots: I32


@dataclass(frozen=True, slots=True)
class MatrixView:
    """One matrix of all slots of a layer, as device memory.

    The matrix of slot `i` begins at `address + i * stride_bytes` and has `matrix_bytes`. `shape` is (ne0, ne1, number
    of slots), the fastest dimension first, as ggml orders them.
    """

    address: int
    stride_bytes: int
    ggml_type: int
    shape: tuple[int, int, int]
    matrix_bytes: int


class LeaseHolder(Protocol):
    """What a lease needs of the manager that gave it.

    `held` is an int32 array with the slots of a group's experts, and behind them a mark: 0 where no slot is pinned.
    """

    def acquire_group(self, lease: Lease, experts: I32, held: I32) -> None:
        """Bring `experts` into slots and pin the slots; write the slots and the mark into `held`."""

    def release_group(self, lease: Lease, held: I32) -> None:
        """Unpin the slots in `held` and clear its mark; do nothing where the mark says that no slot is pinned."""

    def abandon_group(self, lease: Lease, held: I32) -> None:
        """Do as `release_group`, for a group that was never read."""

    def forget(self, lease: Lease) -> None:
        """Note that a lease has ended."""

    def matrix_view(self, layer: int, role: Role) -> MatrixView:
        """Return a matrix of the layer's slots."""


class Lease:
    """Experts of one layer that stay in L1 until `release`. `TierManager.acquire` makes leases.

    `groups` gives the experts in one group where they fit the layer's slots, otherwise in several groups. One group is
    valid at a time: taking the next group releases the group before. The first group is in its slots when `acquire`
    returns. Only one thread may use a lease at a time.
    """

    __slots__ = (
        "_group",
        "_groups",
        "_held",
        "_holder",
        "_layer",
        "_number",
        "_released",
        "_stream",
        "_thread",
    )

    def __init__(
        self, holder: LeaseHolder, layer: int, thread: int, stream: int | None, experts: I32, held: I32
    ) -> None:
        """Make a lease of `experts`, which may be none, as one group.

        `held` has room for the experts' slots and for the mark behind them, which is 0 (`LeaseHolder`). `thread` is the
        thread that asked for the lease, and `stream` the stream on which the experts are read.
        """
        self._holder = holder
        self._layer = layer
        self._thread = thread
        self._stream = stream
        self._groups: tuple[I32, ...] = (experts,)
        self._number = 0
        self._held = held
        self._group: ExpertGroup | None = None  # what the property `held` returned before
        self._released = False

    @property
    def layer(self) -> int:
        """The layer that the experts belong to."""
        return self._layer

    @property
    def thread(self) -> int:
        """The identifier of the thread that acquired the lease."""
        return self._thread

    @property
    def stream(self) -> int | None:
        """The stream on which the experts are read; None: the caller makes sure that reads end before the release."""
        return self._stream

    @property
    def n_groups(self) -> int:
        """How many groups the experts come in; 0 for a lease without experts."""
        return len(self._groups)

    @property
    def held(self) -> ExpertGroup | None:
        """The group that is valid now; None where no group is."""
        held = self._held
        if not held[-1]:
            return None
        if self._group is None:
            self._group = ExpertGroup(self._groups[self._number], held[:-1])
        return self._group

    @property
    def released(self) -> bool:
        """Whether the lease has ended."""
        return self._released

    @property
    def groups(self) -> Iterator[ExpertGroup]:
        """The groups, one after another; each is valid until the next one is taken.

        Taking the next group raises what `TierManager.acquire` raises. The lease then holds no slots, but has to be
        released all the same.
        """
        for number in range(len(self._groups)):
            yield self._take(number)

    def view(self, role: str) -> MatrixView:
        """Return where a matrix (`gate`, `up`, `down` or `gate_up`) of the layer's slots lies.

        Raises `LeaseError` after the release, and `ValueError` for a matrix that the layer does not have.
        """
        self._require_live()
        return self._holder.matrix_view(self._layer, Role(role))

    def as_cupy(self, role: str, dtype: npt.DTypeLike | None = None, *, ordinal: int = 0) -> Any:
        """Return a matrix of all slots as a CuPy array on GPU `ordinal`, without a copy; valid while the lease lives.

        The array is uint8 of shape (slots, matrix bytes). With a `dtype`, for matrices of plain numbers, its shape is
        (slots, ne1, ne0). Raises what `view` and `slots_as_cupy` raise, and `DeviceError` where there is no CuPy.
        """
        return slots_as_cupy(self.view(role), dtype, owner=self, ordinal=ordinal)

    @not_interrupted_at_entry
    def release(self) -> None:
        """Let the experts go. Raises `LeaseError` where the lease was released before.

        An interrupt that comes meanwhile is raised after the release is done.
        """
        if self._released:
            self._require_live()
        try:
            self._end()
        except Exception:
            raise
        except BaseException:  # an interrupt, which may come at any instruction of `_end`
            with interrupts_deferred():
                self._end()
            raise

    def open(self, groups: tuple[I32, ...]) -> None:
        """Set the experts of each group and take the first group; for `TierManager.acquire` only."""
        self._groups = groups
        if groups:
            self._take(0)

    @not_interrupted_at_entry
    def abandon(self) -> None:
        """End a lease that no caller has received, whatever it holds; for `TierManager.acquire` only."""
        with interrupts_deferred():
            self._holder.abandon_group(self, self._held)
            self._released = True
            self._holder.forget(self)

    @not_interrupted_at_entry
    def __enter__(self) -> Self:
        """Return the lease itself."""
        if self._released:  # if not, nothing is called, so that no interrupt comes before the `with` block
            self._require_live()
        return self

    @not_interrupted_at_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lease, unless that was done within the block."""
        if not self._released:
            self.release()

    def _take(self, number: int) -> ExpertGroup:
        """Make a group the valid one; nothing is done where it is valid already."""
        self._require_live()
        if self._number != number or not self._held[-1]:
            experts = self._groups[number]
            held = np.zeros(len(experts) + 1, np.int32)
            try:
                with interrupts_deferred():
                    self._holder.release_group(self, self._held)
                    self._held, self._number, self._group = held, number, None
                    self._holder.acquire_group(self, experts, held)
            except BaseException:
                with interrupts_deferred():
                    self._holder.abandon_group(self, held)
                raise
        group = self.held
        assert group is not None
        return group

    def _end(self) -> None:
        """Release the group and forget the lease. A second call finishes what an interrupted call has left."""
        self._holder.release_group(self, self._held)
        self._released = True
        self._holder.forget(self)

    def _require_live(self) -> None:
        if self._released:
            raise LeaseError(f"this lease on layer {self._layer} was released: acquire the experts again")
