"""The proxy's counters: their list, read from C++'s (ggml_proxy/abi/counters.h), and their values."""

from __future__ import annotations

import ctypes as ct
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from expertier.errors import EngineMismatchError

_LIST = re.compile(r"#define EXPERTIER_(COUNTERS|GAUGES)\(X\)((?:[^\n]*\\\n)*[^\n]*)")
_LINE = re.compile(r'X\((\w+), "([^"]*)"\)')


@dataclass(frozen=True)
class Counter:
    """One line of the list."""

    name: str
    meaning: str
    grows: bool
    """False for a value as of now, which may fall as well."""


@cache
def counter_list() -> tuple[Counter, ...]:
    """Return the list, in the order in which the proxy writes the values."""
    header = files("expertier.engine_adapter.ggml_proxy").joinpath("abi", "counters.h").read_text("utf-8")
    return tuple(
        Counter(name, meaning, kind == "COUNTERS")
        for kind, lines in _LIST.findall(header)
        for name, meaning in _LINE.findall(lines)
    )


class ProxyCounters:
    """What the proxy counted for one model: an attribute for each counter of `counter_list`, by its name.

    Calls, experts or bytes, and nanoseconds where a name ends in `_ns`.
    """

    def __init__(self, values: Iterable[int]) -> None:
        """Take the values in the list's order."""
        self._values = dict(zip((counter.name for counter in counter_list()), values, strict=True))

    @classmethod
    def read(cls, proxy: ct.CDLL, tiers: int) -> ProxyCounters:
        """Return what the proxy has counted for these tiers so far.

        Raises `EngineMismatchError` where the library was compiled from another list.
        """
        values = (ct.c_int64 * len(counter_list()))()
        n_counters = proxy.expertier_tiers_counters(tiers, values, len(values))
        if n_counters != len(values):
            raise EngineMismatchError(
                f"the plugin counts {n_counters} things and this expertier knows {len(values)}: "
                "build the plugin again with `expertier engine --rebuild`"
            )
        return cls(values)

    @classmethod
    def total(cls, counted: Iterable[ProxyCounters]) -> ProxyCounters:
        """Return the sums over several devices' counters."""
        return cls(sum(values) for values in zip(*(each._values.values() for each in counted), strict=True))

    def __getattr__(self, name: str) -> int:
        """Return one value."""
        values: dict[str, int] = self.__dict__.get("_values", {})  # none yet where a copy is made
        if name not in values:
            raise AttributeError(f"the proxy has no counter {name!r}; it has {', '.join(values)}")
        return values[name]

    def __repr__(self) -> str:
        return f"ProxyCounters({', '.join(f'{name}={value}' for name, value in self._values.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProxyCounters) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def as_dict(self) -> dict[str, int]:
        """Return the values by name."""
        return dict(self._values)
