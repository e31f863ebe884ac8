"""A tensor whose values are given and not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.synth_blocks import Bytes, row_bytes

_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor of F16 or F32 whose values a function makes when they are written: float32 of `dims`."""

    name: str
    kind: Literal["F16", "F32"]
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
            part = rows[start : start + _CHUNK_ROWS]
            yield np.ascontiguousarray(part, np.float16 if self.kind == "F16" else np.float32).view(np.uint8)
