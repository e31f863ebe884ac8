"""MOE_PROFILE: the tiers of a model begin as its routing profile says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import expertier as et
from expertier.errors import ConfigError
from expertier.hip.host import HostDevice
from expertier.planner.profiles.file import write_profile
from expertier.planner.profiles.routing_profile import profile_of
from expertier.planner.traces.trace import trace_from_ids
from expertier.testing import FaultPlan, FaultySource, LayerShape, PatternSource, synthetic_table
from expertier.tiers.file.byte_source import ByteSource

TABLE = synthetic_table([LayerShape(n_experts=16), LayerShape(n_experts=16)], top_k=2)
SLOTS = 6


def config(path: Path, **others: object) -> et.TierConfig:
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    return et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0, profile=path, **others)  # type: ignore[arg-type]


def make(path: Path, *, source: ByteSource | None = None, **others: object) -> et.TierManager:
    return et.TierManager(
        TABLE, device=HostDevice(), config=config(path, **others), source=source or PatternSource()
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Layer 0 uses two experts, layer 1 many."""
    steps = [[[3, 12], [step % 8, 8 + step % 5]] for step in range(80)]
    path = tmp_path / "p.npz"
    write_profile(path, profile_of(trace_from_ids(np.array(steps), n_experts=16), "steps"))
    return path


@pytest.mark.parametrize("fill_threads", [0, 2])
def test_slots_follow_it_and_the_most_used_experts_come_first(profile: Path, fill_threads: int) -> None:
    with make(profile, fill_threads=fill_threads) as tiers:
        assert sum(tiers.slots) == 2 * SLOTS
        assert tiers.slots[0] < SLOTS < tiers.slots[1]
        tiers.drain()
        assert set(tiers._residency.residents(0)) == {3, 12}
        assert set(tiers._residency.residents(1)) == {*range(5), *range(8, 13)}
        stats = tiers.stats()
        assert (stats.l1.misses, stats.prefetch.done) == (0, 12)
        tiers.acquire(0, [3, 12]).release()
        assert tiers.stats().l1.misses == 0
        tiers.check_valid()


def test_weights_of_layers_move_slots_and_fetch_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.txt"
    path.write_text("blk.0 1\nblk.1 3\n")
    with make(path) as tiers:
        assert tiers.slots == (3, 9)
        tiers.drain()
        assert tiers.stats().prefetch.asked == 0


def test_reads_that_fail_in_the_background_leave_tiers_that_work(profile: Path) -> None:
    source = FaultySource(PatternSource(), FaultPlan({"read": 5}))
    with make(profile, source=source, fill_threads=0) as tiers:
        tiers.drain()
        assert tiers.stats().prefetch.failed == 1
        assert tiers.stats().prefetch.done == 11
        tiers.check_valid()
        tiers.acquire(1, [0, 8]).release()
        tiers.check_valid()


def test_a_profile_of_another_model_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    write_profile(path, profile_of(trace_from_ids(np.zeros((3, 5, 1), int), n_experts=16), "x"))
    device = HostDevice()
    with pytest.raises(ConfigError, match=r"other\.npz: a profile of 5 layers .* the model has 2 layers"):
        et.TierManager(TABLE, device=device, config=config(path), source=PatternSource())
    with pytest.raises(ConfigError, match=r"none\.npz: No such file"):
        make(tmp_path / "none.npz")


def test_the_variable_names_the_file() -> None:
    assert et.TierConfig.from_env(environ={"MOE_PROFILE": " a/b.npz "}).profile == Path("a/b.npz")
    assert et.TierConfig.from_env(environ={}).profile is None
    for text in ("", "a\0b"):
        with pytest.raises(ConfigError, match=r"MOE_PROFILE=.* cannot be read: give the name of a file"):
            et.TierConfig.from_env(environ={"MOE_PROFILE": text})
