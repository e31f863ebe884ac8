"""The look-up tables and the slots: one call, one truth.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_runs.field_tools import (
    FEW_SLOTS,
    PATIENCE_S,
    PROMPT,
    PausedSource,
    Workers,
    generated,
    stock,
    tiers_on,
    wrong_after,
)
from engine_runs.tiered_runs import SMALL, make_tiers, run_model
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import BusyError, LeaseError
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import LayerPlan
from expertier.tiers.tier_set import TierSet
from limits.waits import is_waiting, wait_until


def test_row_01_ids_and_table_are_one_transaction(engine, path, blocks):
    """Slots change hands at nearly every token, and each token still computes with its own table."""
    with make_tiers(path, FEW_SLOTS) as tiers:
        run = run_model(engine, path, tiers, prompt=PROMPT, n_tokens=48)
        assert run.stats.l1.evictions > 48
    assert run.logits.tobytes() == stock(engine, path, tuple(PROMPT), 48, 512)

    random = np.random.default_rng(1)
    with HostDevice() as device, tiers_on(device, blocks, 3) as tiers:
        for _ in range(50):
            experts = random.choice(10, 3, replace=False).tolist()
            with tiers.acquire(0, experts) as lease:
                assert lease.held.experts.tolist() == experts
                assert blocks.wrong_bytes(lease, lease.held) == []


def test_row_02_no_table_is_left_to_the_scheduler(engine, path, graphs):
    """The scheduler gets stock's graph, in stock's number of splits, and gets it back as it was."""
    with make_tiers(path, FEW_SLOTS) as tiers:
        run = run_model(engine, path, tiers, prompt=PROMPT, n_tokens=2)
    without = run_model(engine, path, None, prompt=PROMPT, n_tokens=2)
    assert run.n_graph_splits == without.n_graph_splits

    for n_slots in (2, FEW_SLOTS, SMALL.experts):  # in passes, and with nodes that are pointed at slots
        with make_tiers(path, n_slots) as tiers:
            binding = TierBinding(engine, tiers)
            try:
                for n_tokens in (3, 1, 7, 3):  # beside a second device, each time with other ids
                    result = graphs.on_proxy(binding, "two layers", n_tokens, scheduled=True)
                    assert (result.status, result.message) == (0, "")
                    assert result.outputs == graphs.on_cpu("two layers", n_tokens)
            finally:
                binding.close()


def test_row_19_experts_belong_to_a_model_a_layer_and_a_number(engine, path, other):
    """Two models whose tensors have equal names and shapes, and may get each other's addresses."""
    prompt = tuple(PROMPT)
    expected = {file: stock(engine, file, prompt, 8, 512) for file in (path, other)}
    assert expected[path] != expected[other]
    with (
        make_tiers(path, 3, host_pool_bytes=8 << 20) as one,
        make_tiers(other, 3, host_pool_bytes=8 << 20) as two,
    ):
        for _ in range(2):
            for file, tiers in ((path, one), (other, two)):
                with (
                    LlamaModel.open(engine, file, tiers=TierSet.of(tiers)) as model,
                    model.context(n_ctx=128, n_threads=1) as context,
                ):
                    assert generated(context, PROMPT, 8) == expected[file]
        assert one.stats().l2.hits > 0
        assert two.stats().l2.hits > 0
        with (
            LlamaModel.open(engine, path, tiers=TierSet.of(one)) as first,
            LlamaModel.open(engine, other, tiers=TierSet.of(two)) as second,
            first.context(n_ctx=128, n_threads=1) as first_context,
            second.context(n_ctx=128, n_threads=1) as second_context,
        ):
            assert generated(first_context, PROMPT, 8) == expected[path]
            assert generated(second_context, PROMPT, 8) == expected[other]


def test_row_24_nobody_sees_memory_that_is_gone(blocks):
    """Slots do not move under a lease, a lease ends once, and after a move all is where the tables say."""
    with HostDevice() as device, tiers_on(device, blocks, 3) as tiers:
        lease = tiers.acquire(0, [1, 2])
        for change in (tiers.close, lambda: tiers.apply(LayerPlan((2, 2), 0, tiers.arena_bytes))):
            with pytest.raises(BusyError):
                change()
        assert blocks.wrong_bytes(lease, lease.held) == []
        lease.release()
        for use in (lease.release, lambda: lease.view("gate"), lambda: list(lease.groups)):
            with pytest.raises(LeaseError):
                use()
        for slots in ((2, 3), (3, 2)):
            tiers.apply(LayerPlan(slots, 0, tiers.arena_bytes))
            assert wrong_after(blocks, tiers, 0, [1, 2]) == []
            tiers.check_valid()
    with pytest.raises(LeaseError, match="closed"):
        tiers.acquire(0, [1])


def test_row_27_what_is_used_or_in_flight_is_not_evicted(blocks):
    source = PausedSource(blocks.bytes)
    source.may_read.set()
    workers = Workers()
    with HostDevice() as device, tiers_on(device, blocks, 3, source=source) as tiers:
        held = tiers.acquire(0, [4])
        slot = held.held.slots.tolist()
        address = held.view("gate").address
        source.may_read.clear()
        source.reading.clear()
        in_flight = []
        workers.start(lambda: in_flight.extend(wrong_after(blocks, tiers, 0, [5])))
        assert source.reading.wait(PATIENCE_S)
        filling = int(tiers._residency.slot_of[0, 5])
        taken = []

        def churn() -> None:
            for expert in (0, 1, 2, 3, 6, 7, 8, 9) * 3:
                with tiers.acquire(0, [expert]) as lease:
                    taken.extend(lease.held.slots.tolist())
                    assert blocks.wrong_bytes(lease, lease.held) == []

        churning = workers.start(churn)
        wait_until(lambda: is_waiting(churning, "read_into"))
        assert int(tiers._residency.slot_of[0, 5]) == filling, "an expert in flight was evicted"
        source.may_read.set()
        workers.finish()
        assert in_flight == []
        assert set(taken).isdisjoint(slot)
        assert (held.held.slots.tolist(), held.view("gate").address) == (slot, address)
        assert blocks.wrong_bytes(held, held.held) == []
        tiers.check_valid()
        held.release()
