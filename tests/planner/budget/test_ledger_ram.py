"""The ledger of RAM: what the host pool gets beside the engine and the page cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError
from expertier.planner.budget.ledger_ram import RamConsumer, plan_ram
from expertier.planner.budget.limited_by import LimitedBy

amounts = st.integers(0, 1000)


@given(amounts, amounts, amounts, amounts, amounts, st.booleans())
def test_it_adds_up(available: int, engine: int, bounce: int, pool: int, arena: int, asked: bool) -> None:
    fixed = engine + bounce + arena
    try:
        ledger = plan_ram(
            available_bytes=available, engine_bytes=engine, bounce_bytes=bounce, pool_bytes=pool,
            limited_by=LimitedBy.POOL, asked=asked, arena_bytes=arena,
        )  # fmt: skip
    except BudgetError:
        assert available < fixed + (pool if asked else 0)
        return
    ledger.check_valid()
    assert sum(ledger.entries.values()) + ledger.unused_bytes == available
    assert ledger.entries[RamConsumer.ARENA] == arena
    assert ledger.host_pool_bytes == min(pool, available - fixed)
    assert ledger.limited_by is (LimitedBy.POOL if ledger.host_pool_bytes == pool else LimitedBy.RAM)
    assert ledger.as_dict()["entries"]["page cache"] == available - fixed - ledger.host_pool_bytes


def test_too_little_says_how_much_and_what_to_lower() -> None:
    given_all = {"available_bytes": 10, "bounce_bytes": 0, "limited_by": LimitedBy.POOL, "asked": True}
    with pytest.raises(BudgetError, match=r"the engine needs .*give at least 1 MiB.* MOE_HOST_POOL_MIB"):
        plan_ram(**given_all, engine_bytes=2, pool_bytes=9)
    with pytest.raises(BudgetError, match=r"the host pool .*MOE_EXPERT_CACHE_MIB"):
        plan_ram(**given_all, engine_bytes=2, pool_bytes=3, arena_bytes=9)
