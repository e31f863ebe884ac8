"""Expert tensors whose rows repeat one drawn block, so that a model of any size is written at the disk's speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from expertier.engine_adapter.models.synth_arch.tensor import Tensor
from expertier.engine_adapter.models.synth_blocks import Bytes, WeightType, random_rows, row_bytes

_POOL_BYTES = 32 << 20  # drawn once for each type and width of rows
_GOLDEN = 0.6180339887  # steps of this share of a circle spread starting points evenly


@dataclass(slots=True)
class RowPool:
    """Random rows of one type, width and spread, drawn at first use: uint8 [rows, bytes of a row]."""

    kind: WeightType
    n_cols: int
    std: float
    _rows: Bytes | None = field(default=None, repr=False)

    def rows(self, seed: int) -> Bytes:
        """Return the rows; the first caller's seed counts."""
        if self._rows is None:
            count = max(_POOL_BYTES // row_bytes(self.kind, self.n_cols), 2)
            self._rows = random_rows(np.random.default_rng(seed), self.kind, count, self.n_cols, self.std)
        return self._rows


@dataclass(frozen=True, slots=True)
class RepeatedTensor:
    """A tensor of experts [experts, rows, columns]; each expert is a stretch of the pool that begins at its own place.

    Until the pool's rows run out, no two experts of a model begin at the same row, so that a mix-up of experts shows.
    """

    tensor: Tensor
    pool: RowPool
    number: int  # the number of the tensor's first expert among all experts that the pool serves
    seed: int

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.tensor.name

    @property
    def kind(self) -> WeightType:
        """Its type."""
        return self.tensor.kind

    @property
    def dims(self) -> tuple[int, ...]:
        """Its dimensions, in NumPy's order."""
        return self.tensor.dims

    @property
    def n_bytes(self) -> int:
        """Bytes of its data, without the file's padding."""
        return self.tensor.n_bytes

    def chunks(self, _rng: np.random.Generator) -> Iterator[Bytes]:
        """Yield the data in order: stretches of the pool, without a copy."""
        n_experts, n_rows, _ = self.dims
        pool = self.pool.rows(self.seed)
        stride = max(round(len(pool) * _GOLDEN), 1)
        while np.gcd(stride, len(pool)) != 1:
            stride += 1
        for expert in range(n_experts):
            at, left = (self.number + expert) * stride % len(pool), n_rows
            while left:
                count = min(left, len(pool) - at)
                yield pool[at : at + count]
                at, left = 0, left - count


def repeat_experts(tensors: list[Tensor], seed: int) -> list[Tensor | RepeatedTensor]:
    """Return `tensors`, where tensors of three dimensions (those of experts) are drawn from pools."""
    pools: dict[tuple[WeightType, int, float], RowPool] = {}
    served: dict[tuple[WeightType, int, float], int] = {}
    repeated: list[Tensor | RepeatedTensor] = []
    for tensor in tensors:
        if "_exps." not in tensor.name or len(tensor.dims) != 3:
            repeated.append(replace(tensor))
            continue
        key = (tensor.kind, tensor.dims[-1], tensor.std)
        pool = pools.setdefault(key, RowPool(*key))
        number = served.get(key, 0)
        served[key] = number + tensor.dims[0]
        repeated.append(RepeatedTensor(tensor, pool, number, seed))
    return repeated
