"""A log of the engine's look-ups: which experts each layer asked the policy for, in order.

It serves checks and recordings. The log stands between the proxy and the policy's compiled `begin`, so it sees what the
policy sees, whatever the policy and the budget. Each look-up enters Python for it, under the layer's lock, which takes
some 10 µs.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any, NamedTuple

_INTS = ct.POINTER(ct.c_int32)
_Begin = ct.CFUNCTYPE(ct.c_int32, ct.c_void_p, ct.c_int32, _INTS, ct.c_int32, _INTS, _INTS)


class Lookup(NamedTuple):
    """One look-up: the tiers' layer, and the distinct experts that it asked for, in the policy's order."""

    layer: int
    experts: tuple[int, ...]


class LookupLog:
    """The look-ups of one model's engine since the last call of `take`.

    Give it to `LlamaModel.open` or `TierBinding`. A call with more experts than
    slots is several look-ups. A look-up that had to wait is logged once, when it is served.
    """

    def __init__(self) -> None:
        self._lookups: list[Lookup] = []
        self._callbacks: list[Any] = []  # C++ keeps their addresses

    def take(self) -> list[Lookup]:
        """Return the look-ups since the last call, and clear the log. To be called while no batch runs."""
        taken, self._lookups = self._lookups, []
        return taken

    def before(self, begin: int, layers: Sequence[int] | None = None) -> int:
        """Return the address of a function that logs a look-up and then calls the function at `begin`; for TierBinding.

        `layers` are the numbers that the model gives to the layers of one of several devices.
        """
        assert layers is not None or not self._callbacks, "one log serves the bindings of one model"
        policy = _Begin(begin)

        def logged(
            directory: int, layer: int, experts: Any, n: int, slots: Any, miss_index: Any
        ) -> int:  # ctypes would only print an exception, so nothing in here raises
            status = int(policy(directory, layer, experts, n, slots, miss_index))
            if status >= 0:
                number = layer if layers is None else layers[layer]
                self._lookups.append(Lookup(number, tuple(experts[:n])))
            return status

        self._callbacks.append(_Begin(logged))
        address = ct.cast(self._callbacks[-1], ct.c_void_p).value
        assert address is not None
        return address
