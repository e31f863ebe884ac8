"""Budgets in RAM are held against the RAM that there is."""

from __future__ import annotations

import pytest

from expertier.engine_adapter.models.synth import TINY_SHAPE, write_model
from expertier.errors import BudgetError
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.room import require_host_room
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExpertTable:
    """8 MiB of experts; 4096 tokens of context take 8 MiB."""
    return ExpertTable.from_gguf(write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TINY_SHAPE))


SLOTS = TierConfig(expert_cache_bytes=4 * MIB, host_pool_bytes=0)


def test_what_there_is(table: ExpertTable) -> None:
    require_host_room(SLOTS, table, ContextShape(n_ctx=4096), available=16 * MIB, total=16 * MIB)
    require_host_room(TierConfig(), table, available=9 * MIB, total=16 * MIB)


@pytest.mark.parametrize(
    ("config", "n_ctx", "available", "words"),
    [
        (SLOTS, 256, 3, "4.0 MiB of expert slots in RAM, of which 3.0 MiB are available"),
        (TierConfig(expert_cache_bytes=1 << 50), 256, 3, "of which 3.0 MiB are available"),
        (TierConfig(expert_cache_bytes=4 * MIB, host_pool_bytes=1 << 50), 256, 16, "the machine has 6.0 MiB"),
        (SLOTS, 4096, 11, "a context of 4096 tokens takes 8.0 MiB"),
        (SLOTS, 999999999, 11, "--ctx"),
    ],
)
def test_what_there_is_not(
    table: ExpertTable, config: TierConfig, n_ctx: int, available: int, words: str
) -> None:
    with pytest.raises(BudgetError, match=words):
        require_host_room(config, table, ContextShape(n_ctx=n_ctx), available=available * MIB, total=6 * MIB)
