"""A plan carried out: what consumers really take, compared with the ledger, undone as a whole where it fails.

    DeviceBooks.open ──► Claim: take, take, ... ──► commit ──► what was taken, settled
                           └── rollback (at any error, or where the books do not balance): all takes undone, last first

Several models on one device plan against one `DeviceBooks`, so that what one has planned and not taken yet is not
given to another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from expertier.errors import BudgetError
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.ledger import Consumer, DeviceLedger, DeviceNeeds, plan_device
from expertier.units import mib

_NOBODY = frozenset({Consumer.RESERVE, Consumer.HEADROOM})
"""What is left free by the plan: nobody takes the reserve, and the driver takes its headroom without telling."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One consumer: what was planned, and what it took. `beyond` is above 0 where it took more."""

    consumer: Consumer
    planned_bytes: int
    taken_bytes: int

    @property
    def beyond_bytes(self) -> int:
        """How much more than planned it took; below 0: less."""
        return self.taken_bytes - self.planned_bytes


class Claim:
    """What a ledger promised, while it is being taken: one transaction. Not for several threads.

    As a context manager it rolls back unless `commit` was reached.
    """

    def __init__(self, ledger: DeviceLedger, closed: Callable[[Claim], None] | None = None) -> None:
        """Begin with what the ledger says is taken already; `closed` is called once, at the end."""
        self.ledger = ledger
        self._closed = closed
        self._taken: dict[Consumer, int] = dict(ledger.taken)
        self._undo: list[Callable[[], None]] = []
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether neither `commit` nor `rollback` was called."""
        return self._is_open

    @property
    def outstanding_bytes(self) -> int:
        """What was planned and not taken yet; 0 once the claim is closed."""
        if not self._is_open:
            return 0
        return sum(
            max(n_bytes - self._taken.get(consumer, 0), 0)
            for consumer, n_bytes in self.ledger.entries.items()
            if consumer not in _NOBODY
        )

    def take(self, consumer: Consumer, n_bytes: int, undo: Callable[[], None] | None = None) -> None:
        """Write down that `consumer` has allocated `n_bytes`; `undo` frees them. Several takes add up."""
        if not self._is_open:
            raise ValueError(f"{consumer} takes {n_bytes} bytes of a claim that is closed")
        if n_bytes < 0 or consumer in _NOBODY:
            raise ValueError(f"{consumer} cannot take {n_bytes} bytes")
        if undo is not None:
            self._undo.append(undo)
        self._taken[consumer] = self._taken.get(consumer, 0) + n_bytes

    def compare(self) -> tuple[Taken, ...]:
        """Return what each consumer took beside what was planned for it."""
        return tuple(
            Taken(consumer, planned, self._taken.get(consumer, 0))
            for consumer, planned in self.ledger.entries.items()
            if consumer not in _NOBODY
        )

    def commit(self) -> Mapping[Consumer, int]:
        """End the claim and return what was taken.

        Consumers may take more than planned where others took less, or out of what nobody needed; not out of the
        reserve and the headroom. Otherwise everything is rolled back, and `BudgetError` says who took too much.
        """
        rows = self.compare()
        free = self.ledger.unused_bytes - sum(row.beyond_bytes for row in rows)
        if free < 0:
            self.rollback()
            over = ", ".join(
                f"{row.consumer} took {mib(row.taken_bytes)} of {mib(row.planned_bytes)} planned"
                for row in rows
                if row.beyond_bytes > 0
            )
            raise BudgetError(
                f"{mib(-free)} more than the device has for them were taken, and given back: {over}; plan again with "
                f"MOE_SLAB_HEADROOM_MIB larger by {-(free // (1 << 20))}"
            )
        self._close()
        return dict(self._taken)

    def rollback(self) -> None:
        """Undo all takes, the last one first, and end the claim; a second call does nothing.

        Every undo is called, whatever others raise; then the first error is raised.
        """
        undo, self._undo = self._undo, []
        errors: list[BaseException] = []
        for call in reversed(undo):
            try:
                call()
            except BaseException as error:
                errors.append(error)
        self._taken = dict(self.ledger.taken)
        self._close()
        if errors:
            raise errors[0]

    def _close(self) -> None:
        was_open, self._is_open = self._is_open, False
        self._undo = []
        if was_open and self._closed is not None:
            self._closed(self)

    def __enter__(self) -> Self:
        """Return the claim itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Roll back what was not committed."""
        if self._is_open:
            self.rollback()


class DeviceBooks:
    """The claims on one device that are open: who plans next sees only what they leave. Thread-safe."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        """`free_bytes` asks the driver."""
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._open: list[Claim] = []

    def open(
        self,
        needs: DeviceNeeds,
        demands: Sequence[LayerDemand],
        *,
        cap_bytes: int | None = None,
        asked_bytes: int | None = None,
    ) -> Claim:
        """Plan with what is free now less what open claims still expect; `needs.free` is replaced by that.

        Raises what `plan_device` raises.
        """
        with self._lock:
            promised = sum(claim.outstanding_bytes for claim in self._open)
            free = max(self._free_bytes() - promised, 0)
            ledger = plan_device(
                replace(needs, free=free), demands, cap_bytes=cap_bytes, asked_bytes=asked_bytes
            )
            claim = Claim(ledger, self._forget)
            self._open.append(claim)
            return claim

    def _forget(self, claim: Claim) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not claim]

    def check_valid(self) -> None:
        """Assert that only open claims are kept."""
        with self._lock:
            assert all(claim.is_open for claim in self._open)
