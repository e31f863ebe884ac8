"""All of a model's tiers are bound, or none: also where the last step of binding fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_runs.tiered_runs import make_tiers, write_small_model
from expertier.engine_adapter.binding.binding_set import bind
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import BusyError, DeviceError
from expertier.tiers.tier_set import TierSet


def test_nothing_stays_bound_where_completing_the_layers_fails(
    loaded_engine: LoadedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement.on_one("CPU")
    with TierSet.of(make_tiers(write_small_model(tmp_path, "Q8_0"), 4)) as tiers:
        with monkeypatch.context() as patched:
            patched.setattr(TierSet, "complete_layers", refuse)
            with pytest.raises(DeviceError, match="told to fail"):
                bind(loaded_engine, tiers, placement)
        binding = bind(loaded_engine, tiers, placement)  # raises where an engine is still bound
        with pytest.raises(BusyError):
            tiers.close()
        binding.close()


def refuse(tiers: TierSet) -> None:
    assert all(manager._usage.bound for manager in tiers.managers), "nothing was bound that could be undone"
    raise DeviceError("told to fail")
