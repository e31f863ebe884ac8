"""A tensor whose values are given instead of drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.models.synth_blocks import Bytes, row_bytes
from expertier.errors import ConfigError

GivenType = Literal["F16", "F32", "Q8_0"]

_CHUNK_ROWS = 4096
_Q8_0_BLOCK = 32


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor whose values a function makes when they are written: float32 of `dims`."""

    name: str
    kind: GivenType
    dims: tuple[int, ...]
    values: Callable[[], npt.NDArray[np.float32]]

    @property
    def n_bytes(self) -> int:
        """Bytes of its data, without the file's padding."""
        return prod(self.dims[:-1]) * row_bytes(self.kind, self.dims[-1])

    def chunks(self, _rng: np.random.Generator) -> Iterator[Bytes]:
        """Yield the data in order: uint8 [rows, bytes of a row] each."""
        values = self.values()
        assert values.shape == self.dims, f"{self.name}: {values.shape} values for {self.dims}"
        rows = values.reshape(-1, self.dims[-1])
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[start : start + _CHUNK_ROWS]
            yield _stored(np.ascontiguousarray(chunk), self.kind)


def given_kind(kind: str) -> GivenType:
    """Return `kind` if given values can be stored in it. Raises ConfigError."""
    if kind not in get_args(GivenType):
        raise ConfigError(
            f"given values cannot be stored as {kind}: give one of {', '.join(get_args(GivenType))}"
        )
    return cast(GivenType, kind)


def _stored(values: npt.NDArray[np.float32], kind: GivenType) -> Bytes:
    """Return rows as a file holds them: uint8 [rows, bytes of a row]."""
    if kind != "Q8_0":
        return values.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
    blocks = values.reshape(len(values), -1, _Q8_0_BLOCK)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    factor = (np.where(largest > 0, largest, 127) / 127).astype(np.float16)  # for zeros any factor will do
    quants = np.rint(blocks / factor.astype(np.float32)).astype(np.int8)
    stored = np.concatenate([factor.view(np.uint8), quants.view(np.uint8)], axis=2)
    return stored.reshape(len(values), -1)
