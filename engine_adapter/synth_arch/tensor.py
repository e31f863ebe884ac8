"""One tensor of a random model: what it is called, its type and shape, and how to draw it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from expertier.engine_adapter.synth_blocks import Bytes, WeightType, random_rows, row_bytes

_CHUNK_WEIGHTS = 1 << 20  # drawn at a time, which bounds the memory beside the tensor's own


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write: its name, type, dimensions (in NumPy's order) and how to draw it.

    With a `std` of 0 every element is `fill`, and the type is F32.
    """

    name: str
    kind: WeightType
    dims: tuple[int, ...]
    std: float = 0.0
    zero_rows: int = 0  # the first rows that are all zero
    row_skew: float = 0.0  # spread of the logarithm of the rows' scales
    fill: float = 1.0

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data, without the file's padding."""
        return prod(self.dims[:-1]) * row_bytes(self.kind, self.dims[-1])

    def draw(self, rng: np.random.Generator) -> Bytes:
        """Draw the data: uint8[rows, bytes of a row]."""
        n_rows, n_cols = prod(self.dims[:-1]), self.dims[-1]
        if self.std == 0.0:
            return np.full((n_rows, n_cols), self.fill, np.float32).view(np.uint8)
        data = np.empty((n_rows, row_bytes(self.kind, n_cols)), np.uint8)
        step = max(1, _CHUNK_WEIGHTS // n_cols)
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            data[start:stop] = random_rows(rng, self.kind, stop - start, n_cols, self.std)
        if self.row_skew:
            data.view(np.float32)[:] *= rng.lognormal(0.0, self.row_skew, (n_rows, 1)).astype(np.float32)
        data[: self.zero_rows] = 0
        return data
