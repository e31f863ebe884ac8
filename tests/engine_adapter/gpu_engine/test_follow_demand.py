"""Numbers of slots that follow demand under an engine: the same logits with any, and nobody is asked too often."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.binding import slab_compute
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import DeviceError
from expertier.planner.budget.allocate import LayerPlan
from expertier.planner.budget.quotas import Proposal
from expertier.units import MIB
from fake_ggml_gpu.computing import (
    FailingMoves,
    assert_sound,
    computing_model,
    counts_of,
    opened_device_lookup,
)
from fake_ggml_gpu.models import assert_same, gpu_model, gpu_tiers, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS

KIND = "gpt-oss"
TOKENS = 40
PROMPT = prompt_tokens(12)


def propose_in_turn(model: LlamaModel, plans: Sequence[Sequence[int]]) -> list[int]:
    """Have each look after three graphs want the next of these numbers of slots; returns the looks, as they come."""
    assert model.binding is not None
    manager, following = model.binding.bindings[0].manager, model.binding.bindings[0]._compute
    assert following is not None
    following._struct.look_graphs = 3
    looks: list[int] = []
    coming = cycle(plans)

    def propose(weights: Sequence[float]) -> Proposal | None:
        looks.append(len(looks))
        assert len(weights) == manager.table.n_layers
        slots = tuple(next(coming))
        demands = manager.table.layer_demands()
        used = sum(demand.bytes_for(n) for demand, n in zip(demands, slots, strict=True))
        return Proposal(LayerPlan(slots, used, manager.arena_bytes), 1.0, 2.0, 3)

    manager.propose_quotas = propose  # it goes with the model
    return looks


@pytest.mark.parametrize("with_device_lookup", [True, False])
@on_fake_gpus
def test_slots_change_layers(gpus: GpuSession, with_device_lookup):
    """Every three graphs, beside compute buffers, with layers that become whole and lose that again."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    n = (SMALL.experts + SMALL.top_k) // 2
    with computing_model(gpus, path, n) as model:
        looks = propose_in_turn(
            model, [(SMALL.experts, SMALL.top_k), (n, n), (SMALL.top_k, SMALL.experts), (n + 1, n - 1)]
        )
        if with_device_lookup:
            with opened_device_lookup(gpus, model):
                for _ in range(2):
                    assert_same(logits_of(model, PROMPT, TOKENS), expected)
        else:
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        assert_sound(model)
        counts = counts_of(model)
        assert counts.quota_moves == len(looks) >= TOKENS // 3, (counts, looks)
        assert counts.failed_moves == 0
    assert gpus.fakes.take_faults() == ""


@on_fake_gpus
def test_slots_change_layers_where_the_engine_computes_elsewhere(gpus: GpuSession):
    """Nothing of the engine's is in the slab then."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    n = SMALL.experts // 2
    with gpu_tiers(gpus, path, n, host_pool_bytes=64 * MIB) as tiers, gpu_model(gpus, tiers) as model:
        looks = propose_in_turn(model, [(n + 1, n - 1), (n, n)])
        assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counts = counts_of(model)
        assert counts.quota_moves == len(looks) >= TOKENS // 3, (counts, looks)
        assert counts.buffers == counts.boundary_bytes == 0
        assert tiers.slots == ((n + 1, n - 1) if len(looks) % 2 else (n, n))
        tiers.check_valid()


@on_fake_gpus
def test_a_move_that_fails_leaves_all_as_it_was(gpus: GpuSession):
    """Whichever of its calls fails: the batch computes what it should, and a later look tries again."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    n = SMALL.experts // 2
    with pytest.MonkeyPatch.context() as patch, computing_model(gpus, path, n) as model:
        failing = FailingMoves(patch)
        propose_in_turn(model, [(n + 2, n - 2), (n, n)])
        for call in (1, 2, 4):
            failing.fail_call(call)
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counts = counts_of(model)
        assert failing.failed == counts.failed_moves == 3, (failing.failed, counts)
        assert counts.quota_moves > 0
        assert isinstance(model.binding.bindings[0].manager.engine.last_error, DeviceError)
        assert_sound(model)


@on_fake_gpus
def test_nobody_asks_where_slots_are_to_stay(gpus: GpuSession):
    """MOE_REBALANCE=0, and CPUs, servers and what nobody has run unless it is 1."""
    assert slab_compute.follows_demand("auto", "CUDA0")
    assert not slab_compute.follows_demand("auto", "ROCm1")
    assert slab_compute.follows_demand(True, "ROCm1")
    assert not slab_compute.follows_demand("auto", "CPU")
    assert not slab_compute.follows_demand("auto", "RPC0[localhost:50052]")
    assert slab_compute.follows_demand(True, "CPU")
    assert not slab_compute.follows_demand(False, "CUDA0")
    path = model_path(gpus, KIND, MODELS[KIND])
    with gpu_tiers(gpus, path, SMALL.top_k, follow_demand=False) as tiers, gpu_model(gpus, tiers) as model:
        tiers.propose_quotas = lambda _: pytest.fail("was asked")
        logits_of(model, PROMPT, 2 * slab_compute.LOOK_GRAPHS)
        assert model.binding.bindings[0]._compute is None
