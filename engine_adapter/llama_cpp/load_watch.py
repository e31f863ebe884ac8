"""Lets an interrupt end a load early: between two tensors the engine asks whether it should continue."""

from __future__ import annotations

from expertier.engine_adapter.abi import structs as abi
from expertier.interrupts import interrupt_pending, raise_pending


class LoadWatch:
    """The callback that the engine calls during one load, within a region that defers interrupts."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self.goes_on = abi.LoadGoesOn(self._goes_on)
        """The C callback for `abi.ModelOptions`; this object must live as long as the load runs."""

    def _goes_on(self) -> int:
        """Return 0 where the load is to end. Python handles pending signals here, because this call enters Python."""
        try:
            return int(self._raised is None and not interrupt_pending())
        except BaseException as error:  # raised by the program's signal handler; ctypes would only print it
            self._raised = error
            return 0

    def raise_interrupt(self) -> None:
        """After the load, raise what ended it: the interrupt, or the error of a signal handler of the program's."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        raise_pending()
