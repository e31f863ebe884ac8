"""One tensor of a random model: its name, type and shape, and how to draw it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from expertier.engine_adapter.models.synth_blocks import Bytes, WeightType, random_rows, row_bytes

_CHUNK_WEIGHTS = 1 << 20  # so many weights are drawn at a time, which bounds the memory


class WritableTensor(Protocol):
    """What the writer needs of a tensor."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def kind(self) -> WeightType:
        """Its type."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Its dimensions, in NumPy's order."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its data, without the file's padding."""

    def chunks(self, rng: np.random.Generator) -> Iterator[Bytes]:
        """Yield its data in order: uint8 [rows, bytes of a row] each."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write: its name, type, dimensions (in NumPy's order) and how to draw it.

    With a `std` of 0 every element is `fill`, and the type is F32.
    """

    name: str
    kind: WeightType
    dims: tuple[int, ...]
    std: float = 0.0
    zero_rows: int = 0  # so many rows at the beginning are zero
    row_skew: float = 0.0  # spread of the logarithm of the rows' scales; for small F32 tensors
    fill: float = 1.0

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data, without the file's padding."""
        return prod(self.dims[:-1]) * row_bytes(self.kind, self.dims[-1])

    def chunks(self, rng: np.random.Generator) -> Iterator[Bytes]:
        """Draw the data in order: uint8 [rows, bytes of a row] each, a few MiB at a time."""
        n_rows, n_cols = prod(self.dims[:-1]), self.dims[-1]
        step = max(1, _CHUNK_WEIGHTS // n_cols)
        if self.row_skew:
            yield self._skewed(rng, n_rows, n_cols, step)
            return
        for start in range(0, n_rows, step):
            count = min(step, n_rows - start)
            yield self._rows(rng, start, count, n_cols)

    def _rows(self, rng: np.random.Generator, start: int, count: int, n_cols: int) -> Bytes:
        if self.std == 0.0:
            return np.full((count, n_cols), self.fill, np.float32).view(np.uint8)
        data = random_rows(rng, self.kind, count, n_cols, self.std)
        data[: max(self.zero_rows - start, 0)] = 0
        return data

    def _skewed(self, rng: np.random.Generator, n_rows: int, n_cols: int, step: int) -> Bytes:
        """Draw all rows, then their scales."""
        starts = range(0, n_rows, step)
        data = np.concatenate([self._rows(rng, s, min(step, n_rows - s), n_cols) for s in starts])
        data.view(np.float32)[:] *= rng.lognormal(0.0, self.row_skew, (n_rows, 1)).astype(np.float32)
        return data
