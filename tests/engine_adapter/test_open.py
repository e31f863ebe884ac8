"""The tiers that a host opens and binds in one call: what a failure leaves behind, and what closing ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter import open as opening_tiers
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.open import open_bound_tiers
from expertier.errors import BusyError, LeaseError
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet


def test_closing_unbinds_and_frees(loaded_engine: LoadedEngine, tmp_path: Path) -> None:
    table = ExpertTable.from_gguf(write_small_model(tmp_path, "Q8_0"))
    bound = open_bound_tiers(loaded_engine, table, TierConfig())
    assert bound.binding.tiers is bound.tiers
    with pytest.raises(BusyError):
        bound.tiers.close()  # an engine is bound
    bound.close()
    bound.close()
    with pytest.raises(LeaseError):
        bound.tiers.managers[0].acquire(0, [0])


def test_where_binding_fails_the_tiers_are_freed(
    loaded_engine: LoadedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[TierSet] = []

    def refuse(_engine: Any, tiers: TierSet, _placement: Any) -> None:
        opened.append(tiers)
        raise BusyError("told to fail")

    monkeypatch.setattr(opening_tiers, "bind", refuse)
    table = ExpertTable.from_gguf(write_small_model(tmp_path, "Q8_0"))
    with pytest.raises(BusyError, match="told to fail"):
        open_bound_tiers(loaded_engine, table, TierConfig())
    with pytest.raises(LeaseError):
        opened[0].managers[0].acquire(0, [0])
