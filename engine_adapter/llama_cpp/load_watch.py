"""Lets an interrupt end a load early: between two tensors the engine asks whether to go on."""

from __future__ import annotations

from expertier.engine_adapter.abi import structs as abi
from expertier.interrupts import interrupt_pending, raise_pending


class LoadWatch:
    """What the engine asks during one load, within a region that defers interrupts."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self.goes_on = abi.LoadGoesOn(self._goes_on)
        """For `abi.ModelOptions`; to be kept for as long as the load runs."""

    def _goes_on(self) -> int:
        """Return 0 where the load is to end. Entering Python is what lets signals be handled meanwhile."""
        try:
            return int(self._raised is None and not interrupt_pending())
        except BaseException as error:  # a signal handler of the program's: ctypes would print it and go on
            self._raised = error
            return 0

    def raise_interrupt(self) -> None:
        """Raise what made the load end, after it: the interrupt, or what a handler of the program's raised."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        raise_pending()
