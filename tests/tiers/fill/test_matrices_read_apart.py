"""A large expert that is missed alone: its matrices are read at the same time."""

from __future__ import annotations

import ctypes
import threading
from itertools import count

import pytest

from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.testing.pattern_source import PatternSource
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.tiers.config.config import TierConfig
from expertier.tiers.fill.filler import READ_APART_BYTES
from expertier.tiers.manager import TierManager
from expertier.tiers.model.span import Span

_TABLE = synthetic_table([LayerShape(n_experts=2, n_embd=2048, n_ff=1024)])
_LAYER = _TABLE.layers[0]
_WAIT_S = 10


class TogetherSource(PatternSource):
    """Lets a read end when the expert's other matrices are being read, too; fails the N-th where asked."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self._together = threading.Barrier(len(_LAYER.matrices))
        self._fails_at = fails_at
        self._number = count()
        self.running = 0

    def read_into(self, span: Span, buffer: memoryview) -> None:
        self.running += 1
        try:
            number = next(self._number)
            self._together.wait(_WAIT_S)
            if number == self._fails_at:
                raise SourceError("planted")
            super().read_into(span, buffer)
        finally:
            self.running -= 1


def _config(pool_bytes: int) -> TierConfig:
    return TierConfig(
        expert_cache_bytes=_TABLE.expert_bytes_total, host_pool_bytes=pool_bytes, fill_threads=4
    )


@pytest.mark.parametrize("pool_bytes", [0, 16 << 20])
def test_matrices_come_together(pool_bytes: int) -> None:
    assert _LAYER.expert_bytes >= READ_APART_BYTES
    source = TogetherSource()
    with (
        HostDevice() as device,
        TierManager(_TABLE, device=device, config=_config(pool_bytes), source=source) as tiers,
        tiers.acquire(0, [1]) as lease,
    ):
        for matrix, span in zip(_LAYER.matrices, _LAYER.spans(1), strict=True):
            view = lease.view(matrix.role)
            assert lease.held is not None
            address = view.address + int(lease.held.slots[0]) * view.stride_bytes
            assert ctypes.string_at(address, span.n_bytes) == source.expected(span)


@pytest.mark.parametrize("pool_bytes", [0, 16 << 20])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_one_that_fails_is_waited_for_by_the_others(pool_bytes: int, fails_at: int) -> None:
    source = TogetherSource(fails_at)
    with (
        HostDevice() as device,
        TierManager(_TABLE, device=device, config=_config(pool_bytes), source=source) as tiers,
    ):
        with pytest.raises(SourceError, match="planted"):
            tiers.acquire(0, [1])
        assert source.running == 0
        tiers.check_valid()
        tiers.acquire(0, [1]).release()
        tiers.check_valid()
