"""All calls of the tiers, interrupted at every instruction; `test_interrupted.py` has a sample of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import expertier as et
from interrupted_calls import (
    ALL,
    OPERATIONS,
    closed_at,
    everywhere,
    evict,
    miss,
    opened_or_not,
    parts,
)
from interrupted_tiers import DEVICES, config, default_handler

pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("_interrupts")]


@pytest.fixture
def _interrupts() -> Iterator[None]:
    with default_handler():
        yield


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("call", [miss, parts])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_anywhere(
    device: str, call: Callable[[et.TierManager], None], pool_experts: int
) -> None:
    assert everywhere(device, config(pool_experts=pool_experts), call, before=evict) > 2000


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_rest_interrupted_anywhere(device: str, name: str, pool_experts: int) -> None:
    call, before, undo = OPERATIONS[name]
    assert everywhere(device, config(pool_experts=pool_experts), call, before=before, undo=undo) > 500


def test_opening_and_closing_interrupted_anywhere() -> None:
    n, opened = opened_or_not(ALL)
    assert n > 10_000
    assert opened < 5, "only after the last statement"
    assert closed_at(ALL) > 1000
