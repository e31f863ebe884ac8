"""Graphs, batches and contexts of every width and order.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_runs.field_tools import FEW_SLOTS, PROMPT, Workers, generated, stock, tiers_on, wrong_after
from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import LayerPlan
from expertier.tiers.tier_set import TierSet


def test_row_07_contexts_come_and_go_beside_each_other(engine, path):
    """A wide context opens, runs and closes between the tokens of a narrow one; then both run at once."""
    narrow_prompt, wide_prompt = PROMPT, prompt_tokens(90)[::-1]
    with (
        make_tiers(path, FEW_SLOTS) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_ubatch=8, n_threads=1) as narrow,
    ):
        narrow.decode(narrow_prompt, 0, all_logits=True)
        logits = [narrow.logits(i) for i in range(len(narrow_prompt))]
        for position in range(len(narrow_prompt), len(narrow_prompt) + 4):
            token = narrow.sample()
            with model.context(n_ctx=512, n_ubatch=256, n_threads=1) as wide:
                found = generated(wide, wide_prompt, 1)
                assert found == stock(engine, path, tuple(wide_prompt), 1, 256)
                narrow.decode([token], position)
            logits.append(narrow.logits())
    assert np.stack(logits).tobytes() == stock(engine, path, tuple(narrow_prompt), 4, 8)

    workers = Workers()
    with (
        make_tiers(path, SMALL.experts) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
    ):

        def work(prompt: list[int], n_ubatch: int) -> None:
            expected = stock(engine, path, tuple(prompt), 4, n_ubatch)
            with model.context(n_ctx=512, n_ubatch=n_ubatch, n_threads=1) as context:
                for _ in range(24):
                    assert generated(context, prompt, 4) == expected

        for prompt, n_ubatch in ((narrow_prompt, 8), (wide_prompt, 256)):
            stock(engine, path, tuple(prompt), 4, n_ubatch)  # made before: not by two threads
            workers.start(lambda prompt=prompt, n_ubatch=n_ubatch: work(prompt, n_ubatch))
        workers.finish()


def test_row_10_the_tiers_serve_every_graph_from_the_first_on(engine, path):
    """Batches of all widths after the first graph, as a draft and its verification make them."""
    widths = (1, 40, 1, 5, 2, 17, 1)

    def run(model: LlamaModel) -> tuple[bytes, list[int]]:
        logits, reads = [], [0]
        with model.context(n_ctx=128, n_threads=1) as context:
            for begin, width in zip(np.cumsum((0, *widths[:-1])).tolist(), widths, strict=True):
                context.decode(prompt_tokens(80)[begin : begin + width], begin, all_logits=True)
                logits += [context.logits(i) for i in range(width)]
                if model.binding is not None:
                    reads.append(model.binding.counters().id_reads)
        return np.stack(logits).tobytes(), np.diff(reads).tolist()

    with LlamaModel.open(engine, path, repack=False) as model:
        expected, _ = run(model)
    with (
        make_tiers(path, FEW_SLOTS) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
    ):
        found, reads = run(model)
    assert found == expected
    assert reads == [SMALL.layers] * len(widths)


def test_row_15_shards_and_other_odd_geometry_end_in_an_error(engine, path, graphs, blocks):
    with make_tiers(path, 2) as tiers:
        binding = TierBinding(engine, tiers)
        try:
            refused = graphs.on_proxy(binding, "view of experts", 3)
            assert refused.status < 0
            assert "blk.0.ffn_gate_exps.weight" in refused.message
            assert_nothing_held(tiers)
            elsewhere = graphs.on_proxy(binding, "view of experts", 3, scheduled=True)
            assert (elsewhere.status, elsewhere.message) == (0, ""), (
                "the scheduler has copied the file's bytes"
            )
            assert elsewhere.outputs == graphs.on_cpu("view of experts", 3)
            assert_nothing_held(tiers)
            assert graphs.on_proxy(binding, "plain", 3).outputs == graphs.on_cpu("plain", 3)
        finally:
            binding.close()

    with HostDevice() as device, tiers_on(device, blocks, 3) as tiers:
        for layer, expert in ((0, 10), (0, -1), (1, 6), (2, 0), (-1, 0)):
            with pytest.raises(IndexError):
                tiers.acquire(layer, [expert])
        for slots in ((0, 3), (3,), (3, 3, 3), (-1, 3)):
            with pytest.raises(ValueError, match="need a slot each"):
                tiers.apply(LayerPlan(slots, 0, tiers.arena_bytes))
        assert tiers.slots == (3, 3)
        assert wrong_after(blocks, tiers, 1, range(6)) == []


def test_row_16_consumers_without_rows_do_nothing(engine, path):
    """Of a prompt in five pieces only the last has rows in the last layer, as logits are asked for one token."""
    with (
        LlamaModel.open(engine, path, repack=False) as model,
        model.context(n_ubatch=8, n_threads=1) as context,
    ):
        context.decode(PROMPT, 0)
        expected = context.logits()
    assert np.isfinite(expected).all()
    for n_slots in (1, FEW_SLOTS, SMALL.experts):
        with (
            make_tiers(path, n_slots) as tiers,
            LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
            model.context(n_ubatch=8, n_threads=1) as context,
        ):
            context.decode(PROMPT, 0)
            assert context.logits().tobytes() == expected.tobytes()
            last = tiers._residency.counters[-1]
            assert last[1] + last[2] == SMALL.top_k, "the last layer asks for one token's experts only"
            before = tiers.stats()
            tiers.acquire(0, []).release()
            assert tiers.stats() == before


def test_row_25_later_prefills_copy_no_more_than_the_first(engine, path):
    """They copy less, and all of them the same; what the pool holds by then is not read again."""
    prompt = prompt_tokens(120)
    with (
        make_tiers(path, SMALL.experts // 2, host_pool_bytes=4 << 20) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        copied, pinned, read = [0], [], [0]
        for _ in range(5):
            context.forget()
            context.decode(prompt, 0)
            stats = tiers.stats()
            copied.append(stats.l1.bytes_in)
            read.append(stats.file.bytes_read)
            pinned.append(tiers._device.pinned_bytes)
    first, *later = np.diff(copied).tolist()
    assert max(later) == min(later) < first
    # What the engine reads from L2 by itself counts as used when L2 looks for room, so its order settles late.
    assert np.diff(read).tolist()[3:] == [0, 0]
    assert len(set(pinned)) == 1, "memory was taken after the first prefill"
