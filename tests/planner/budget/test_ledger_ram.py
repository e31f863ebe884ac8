"""The ledger of RAM: what the host pool gets beside the engine and the page cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError
from expertier.planner.budget.ledger_ram import RamConsumer, plan_ram
from expertier.planner.budget.limited_by import LimitedBy

amounts = st.integers(0, 1000)


@given(amounts, amounts, amounts, amounts, amounts, amounts, st.booleans())
def test_it_adds_up(
    available: int, engine: int, bounce: int, copies: int, wanted: int, arena: int, asked: bool
) -> None:
    fixed = engine + bounce + arena
    try:
        ledger = plan_ram(
            available_bytes=available, engine_bytes=engine, bounce_bytes=bounce, copies_bytes=copies,
            wanted_bytes=wanted, asked=asked, arena_bytes=arena,
        )  # fmt: skip
    except BudgetError:
        assert available < fixed + (wanted if asked else 0)
        return
    ledger.check_valid()
    assert sum(ledger.entries.values()) + ledger.unused_bytes == available
    pool = ledger.host_pool_bytes
    assert pool <= min(copies, wanted)
    if asked:
        assert pool == min(copies, wanted)
    else:
        left = ledger.entries[RamConsumer.PAGE_CACHE] + fixed
        assert pool == 0 or left >= available // 2, "half of the RAM is left to the others"
        if pool < min(copies, wanted):
            assert ledger.limited_by is LimitedBy.RAM


def test_what_binds() -> None:
    given_all = {"available_bytes": 1000, "engine_bytes": 100, "bounce_bytes": 10}
    assert plan_ram(**given_all, copies_bytes=50, wanted_bytes=80).limited_by is LimitedBy.SLOTS
    assert plan_ram(**given_all, copies_bytes=90, wanted_bytes=80).limited_by is LimitedBy.POOL
    ledger = plan_ram(**given_all, copies_bytes=900, wanted_bytes=800)
    assert (ledger.limited_by, ledger.host_pool_bytes) == (LimitedBy.RAM, 500)
    assert plan_ram(**given_all, copies_bytes=900, wanted_bytes=800, asked=True).host_pool_bytes == 800
    assert ledger.as_dict()["entries"]["page cache"] == 390


def test_too_little_says_how_much() -> None:
    with pytest.raises(BudgetError, match=r"the engine needs .*give at least 1 MiB"):
        plan_ram(available_bytes=10, engine_bytes=20, bounce_bytes=0, copies_bytes=1, wanted_bytes=1)
    with pytest.raises(BudgetError, match="the host pool"):
        plan_ram(
            available_bytes=25, engine_bytes=20, bounce_bytes=0, copies_bytes=9, wanted_bytes=9, asked=True
        )
