"""How fast a machine computes and moves bytes: measured by `expertier probe`, or assumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

ASSUMED_SPREAD = 0.5
"""The share by which an assumed rate may be wrong."""

_PATHS = ("decode", "prefill", "pool", "page_cache", "disk")


@dataclass(frozen=True, slots=True)
class PathRate:
    """The speed of a path that experts take: `n` experts of `b` bytes take `n * each_s + b / bytes_per_s` seconds.

    `spread` is the share by which that may be wrong; `measured` says whether it was measured on this machine.
    """

    bytes_per_s: float
    each_s: float = 0.0
    spread: float = ASSUMED_SPREAD
    measured: bool = False

    def seconds(self, n: float, n_bytes: float) -> float:
        """Return how long `n` experts of `n_bytes` in all take."""
        return n * self.each_s + n_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The rates of a machine.

    `decode` reads the weights for one token; its `each_s` is what a layer costs apart from its weights. `prefill` is
    the same for a wide batch, in bytes of weights times tokens a second. `pool` fills a slot from L2, `page_cache` and
    `disk` fill it from the file. `token_s` is what a token of any model costs, and `lookup_s` what a layer without a
    slot for every expert costs more; both are 0 where they were not measured separately.
    """

    decode: PathRate
    prefill: PathRate
    pool: PathRate
    page_cache: PathRate
    disk: PathRate
    token_s: float = 0.0
    lookup_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all rates by name, for `--json` and for the probe's file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Read what `as_dict` returned. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        paths = {name: PathRate(**document[name]) for name in _PATHS}
        return cls(**paths, token_s=float(document["token_s"]), lookup_s=float(document["lookup_s"]))
