"""Failures that systems of this kind have had in the field: each test bears the number of its row.

docs/field-failures.md lists all rows, those without a test too, with what users saw.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import expertier as et
from expert_graphs import ExpertGraphs
from expertier.engine_adapter import exec_tool
from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.generation import generate
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel, LoadedEngine
from expertier.engine_adapter.llama_cpp.tier_binding import TierBinding
from expertier.engine_adapter.open_engine import open_engine
from expertier.engine_adapter.synth import write_model
from expertier.errors import (
    BudgetError,
    BusyError,
    DecodeError,
    DeviceError,
    EngineError,
    LeaseError,
    SourceError,
)
from expertier.hip.fault_plan import FaultPlan
from expertier.hip.faults import FaultyDevice
from expertier.hip.host import HostDevice
from expertier.planner.allocate import LayerPlan, full_bytes, plan_layers
from expertier.planner.demand import LayerDemand
from expertier.tiers.budget import resolve
from expertier.tiers.slot_layout import GUARD_BYTES
from expertier.units import MIB
from failing_reads import FailingReads
from gguf_files import Block, BytesSource, ModelFile
from gguf_files import write_model as write_blocks
from tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens, run_model

PROMPT = prompt_tokens(40)
FEW_SLOTS = SMALL.top_k + 1
PATIENCE_S = 30  # for what must happen
GLIMPSE_S = 0.2  # for what must not


# ---- models, tiers and devices


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> LoadedEngine:
    """The engine with our plugin."""
    folder = os.environ.get(CACHE_VARIABLE) or str(request.config.cache.mkdir("expertier"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, folder)
        return open_engine()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the engine runs."""
    return write_model(tmp_path_factory.mktemp("field") / "one.gguf", SMALL)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same names, types and shapes as `path`, with other weights."""
    return write_model(tmp_path_factory.mktemp("field") / "two.gguf", replace(SMALL, seed=SMALL.seed + 1))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """Experts without an engine: a layer of slots in one piece, and one of arrays."""
    layers = [Block(n_experts=10), Block(n_experts=6, types=("Q4_0", "Q4_0", "Q8_0"))]
    return write_blocks(tmp_path_factory.mktemp("field") / "blocks.gguf", layers)


@pytest.fixture(scope="module")
def graphs(engine: LoadedEngine, path: Path, tmp_path_factory: pytest.TempPathFactory) -> ExpertGraphs:
    """Graphs over the experts of `path`, to run on the proxy."""
    assert engine.proxy
    return ExpertGraphs(path, tmp_path_factory.mktemp("graphs"))


def config_for(table: et.ExpertTable, n_slots: int, host_pool_bytes: int = 0) -> et.TierConfig:
    budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
    return et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=host_pool_bytes)


def tiers_on(
    device: object, model: ModelFile, n_slots: int, host_pool_bytes: int = 0, source: object = None
) -> et.TierManager:
    config = config_for(model.table, n_slots, host_pool_bytes)
    return et.TierManager(model.table, device=device, config=config, source=source)


def wrong_after(model: ModelFile, tiers: et.TierManager, layer: int, experts: Sequence[int]) -> list:
    """Use experts once, and return those whose bytes were not the file's."""
    with tiers.acquire(layer, experts) as lease:
        return [wrong for part in lease.parts for wrong in model.wrong_bytes(lease, part)]


class WatchedDevice:
    """The host as a device: it knows its pinned ranges and the sources of its copies, and may be held up.

    One that `doubles` allocates powers of two only, from 16 KiB up: twice as much as the experts need.
    """

    def __init__(self, *, doubles: bool = False) -> None:
        self.inner = HostDevice()
        self.pinned: dict[int, int] = {}
        self.strangers: list[int] = []
        self.n_copies = 0
        self.hold_up: Callable[[], None] | None = None
        self._doubles = doubles

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def allocation_bytes(self, n_bytes: int) -> int:
        pages = self.inner.allocation_bytes(n_bytes)
        return max(16384, 1 << (pages - 1).bit_length()) if self._doubles else pages

    def alloc_pinned(self, n_bytes: int) -> int:
        size = self.allocation_bytes(n_bytes)
        address = self.inner.alloc_pinned(size)
        self.pinned[address] = size
        return address

    def free(self, address: int) -> None:
        self.pinned.pop(address, None)
        self.inner.free(address)

    def copy_in(self, target: int, source: int, n_bytes: int) -> None:
        """Copy one half, wait where a test wants that, copy the other half."""
        self.n_copies += 1
        if not any(begin <= source and source + n_bytes <= begin + n for begin, n in self.pinned.items()):
            self.strangers.append(source)
        half = n_bytes // 2
        self.inner.copy_in(target, source, half)
        if self.hold_up is not None:
            self.hold_up()
        self.inner.copy_in(target + half, source + half, n_bytes - half)


class GatedSource:
    """Bytes in memory whose reads wait until they are let through."""

    def __init__(self, data: bytes) -> None:
        self.inner = BytesSource(data)
        self.reading = threading.Event()
        self.gate = threading.Event()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reading.set()
        assert self.gate.wait(PATIENCE_S)
        self.inner.read_into(offset, buffer)


class Workers:
    """Threads whose errors are not lost."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a thread waits for ever"
        assert self.errors == []


@cache
def stock(engine: LoadedEngine, path: Path, prompt: tuple[int, ...], n_tokens: int, n_ubatch: int) -> bytes:
    """The stock engine's logits of a prompt and what it continues with."""
    run = run_model(engine, path, None, prompt=list(prompt), n_tokens=n_tokens, n_ubatch=n_ubatch)
    assert np.isfinite(run.logits).all()
    return run.logits.tobytes()


def generated(context: LlamaContext, prompt: Sequence[int], n_tokens: int) -> bytes:
    """The logits of a prompt and what follows, from an empty cache."""
    context.forget()
    return np.stack(generate(context, prompt, n_tokens, keep_logits=True).logits).tobytes()


# ---- the page, and one test a row


def test_the_page_lists_every_row_and_every_test():
    page = Path(__file__).parents[2] / "docs" / "field-failures.md"
    rows = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| (\d+) \|", line):
            assert int(found[1]) not in rows, f"row {found[1]} is there twice"
            rows[int(found[1])] = line
    assert sorted(rows) == list(range(1, 35))
    tests = {name: int(name.split("_")[2]) for name in globals() if name.startswith("test_row_")}
    for number, line in rows.items():
        named = set(re.findall(r"\btest_row_\w+", line))
        assert named == {name for name, row in tests.items() if row == number}, line


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


def test_row_03_admitted_or_an_error_with_numbers(engine, path):
    """At the smallest budget every layer is served by the tiers; a byte below it there are none at all."""
    table = et.ExpertTable.from_gguf(path)
    smallest = config_for(table, 1)
    with HostDevice() as device:
        too_small = replace(smallest, expert_cache_bytes=smallest.expert_cache_bytes - 1)
        with pytest.raises(BudgetError, match=r"one slot in each of 3 layers takes [0-9.]+ MiB.*at least \d"):
            et.TierManager(table, device=device, config=too_small)
        assert device.device_bytes == device.pinned_bytes == 0
        with et.TierManager(table, device=device, config=smallest) as tiers:
            run = run_model(engine, path, tiers, prompt=PROMPT, n_tokens=3)
            assert tiers.slots == (1,) * SMALL.layers
            assert min(tiers._residency.fills_by_layer()) > 0
    assert run.counters.id_reads == SMALL.layers * run.counters.graphs
    assert run.load.expert_bytes == 0


def test_row_05_a_staging_block_is_not_reused_while_a_copy_reads_it(blocks):
    device = WatchedDevice()
    copying, gate, wrong = threading.Semaphore(0), threading.Event(), []

    def hold_up() -> None:
        copying.release()
        assert gate.wait(PATIENCE_S)

    workers = Workers()
    with tiers_on(device, blocks, 6) as tiers:  # without a pool, all fills go through the two bounce blocks
        device.hold_up = hold_up
        for expert in range(4):
            workers.start(lambda expert=expert: wrong.extend(wrong_after(blocks, tiers, 0, [expert])))
        for _ in range(2):
            assert copying.acquire(timeout=PATIENCE_S)
        try:
            assert not copying.acquire(timeout=GLIMPSE_S), "a third fill found a block that a copy reads"
        finally:
            gate.set()
        workers.finish()
        assert wrong == []
        tiers.check_valid()


def test_row_06_every_range_on_every_device_ends_in_zeros(blocks):
    def not_zero(tiers: et.TierManager) -> list[int]:
        found = []
        for layer, n_slots in enumerate(tiers.slots):
            layout = blocks.table.slot_layouts[layer]
            places = tiers._slab.places(layer)
            for place in places[:1] if layout.stride else places:
                end = tiers._slab.base + place.offset + n_slots * place.stride
                found += [layer] * (ctypes.string_at(end, GUARD_BYTES) != bytes(GUARD_BYTES))
        return found

    with (
        HostDevice() as one,
        HostDevice() as two,
        tiers_on(one, blocks, 4) as first,
        tiers_on(two, blocks, 4) as second,
    ):
        for tiers in (first, second):
            for slots in (tiers.slots, (1, 5), (6, 1), (2, 3)):  # guards come to lie where experts were
                tiers.apply(LayerPlan(slots, 0, tiers.arena_bytes))
                for layer in range(2):
                    assert wrong_after(blocks, tiers, layer, range(6)) == []
                assert not_zero(tiers) == []


def test_row_07_contexts_come_and_go_beside_each_other(engine, path):
    """A wide context opens, runs and closes between the tokens of a narrow one, over and over."""
    narrow_prompt, wide_prompt = PROMPT, prompt_tokens(90)[::-1]
    with (
        make_tiers(path, FEW_SLOTS) as tiers,
        LlamaModel.open(engine, path, tiers=tiers) as model,
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


def test_row_08_one_failure_costs_one_batch_and_not_the_cache(engine, path, monkeypatch):
    reads = FailingReads(monkeypatch)
    hits = {}
    for fails in (False, True):
        with (
            make_tiers(path, 8) as tiers,
            LlamaModel.open(engine, path, tiers=tiers) as model,
            model.context(n_ctx=128, n_threads=1) as context,
        ):
            if fails:
                reads.fail_call(5)
                with pytest.raises(DecodeError):
                    context.decode(PROMPT, 0)
            before = tiers.stats().l1
            lookups = model.binding.counters().lookups
            assert generated(context, PROMPT, 16) == stock(engine, path, tuple(PROMPT), 16, 512)
            after = tiers.stats().l1
            assert after.slots == before.slots == 8 * SMALL.layers
            assert model.binding.counters().lookups >= lookups + 17 * SMALL.layers
            hits[fails] = after.hits - before.hits
    assert hits[True] >= 0.9 * hits[False] > 0


def test_row_09_little_is_lost_to_rounding(path):
    """Less than a slot of any budget is left over, padding is below 1 %, and the numbers say how much."""
    table = et.ExpertTable.from_gguf(path)
    demands, layouts = table.layer_demands(), table.slot_layouts
    for layer, demand, layout in zip(table.layers, demands, layouts, strict=True):
        assert demand.slot_bytes == layout.slot_bytes <= 1.01 * layer.expert_bytes
    smallest = sum(demand.bytes_for(1) for demand in demands)
    for budget in range(smallest, full_bytes(demands), 100_003):
        with (
            HostDevice() as device,
            et.TierManager(
                table, device=device, config=et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
            ) as tiers,
        ):
            l1 = tiers.stats().l1
            assert l1.budget_bytes == budget
            assert (
                0
                <= budget - l1.used_bytes
                < max(demand.slot_bytes for demand in demands) + 1024 * len(demands)
            )
            assert device.device_bytes < budget + 2 * 4096

    large = [LayerDemand(layer, 128, 8, 3_059_712, 640) for layer in range(48)]
    plan = plan_layers(large, budget_bytes=8192 * MIB)
    assert plan.budget_bytes - plan.used_bytes <= 0.01 * plan.budget_bytes


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
    with make_tiers(path, FEW_SLOTS) as tiers, LlamaModel.open(engine, path, tiers=tiers) as model:
        found, reads = run(model)
    assert found == expected
    assert reads == [SMALL.layers] * len(widths)


def test_row_12_no_flat_reserve_makes_a_small_machine_go_without(path):
    table = et.ExpertTable.from_gguf(path)
    smallest = sum(demand.bytes_for(1) for demand in table.layer_demands())
    given = []
    for available in (2 * smallest, 3 * smallest, 64 * MIB, 1 << 40):
        budgets = resolve(et.TierConfig(), table, available)
        assert smallest <= budgets.expert_cache_bytes + budgets.host_pool_bytes <= available / 2
        given.append(budgets.expert_cache_bytes)
    assert given == sorted(given)
    with pytest.raises(BudgetError, match=r"takes [0-9.]+ MiB.*half of the [0-9.]+ MiB of RAM available"):
        resolve(et.TierConfig(), table, 2 * smallest - 2)


@pytest.mark.parametrize("host_pool_bytes", [0, 5 * 4096])
def test_row_14_staging_memory_is_counted_and_found_at_the_start(blocks, host_pool_bytes):
    with HostDevice() as device, tiers_on(device, blocks, 3, host_pool_bytes) as tiers:
        for expert in range(10):
            assert wrong_after(blocks, tiers, 0, [expert]) == []
            l2 = tiers.stats().l2
            assert device.pinned_bytes == l2.used_bytes + l2.bounce_bytes <= host_pool_bytes + l2.bounce_bytes
    for nth in (1, 2):
        with HostDevice() as inner:
            device = FaultyDevice(inner, FaultPlan({"alloc_pinned": nth}))
            with pytest.raises(DeviceError):
                tiers_on(device, blocks, 3, host_pool_bytes)
            assert inner.device_bytes == inner.pinned_bytes == 0


def test_row_15_slices_and_other_odd_geometry_end_in_an_error(engine, path, graphs, blocks):
    with make_tiers(path, 2) as tiers:
        binding = TierBinding(engine, tiers)
        try:
            for scheduled in (False, True):
                result = graphs.on_proxy(binding, "view of experts", 3, scheduled=scheduled)
                assert scheduled or result.status < 0
                assert "blk.0.ffn_gate_exps.weight" in result.message
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
            LlamaModel.open(engine, path, tiers=tiers) as model,
            model.context(n_ubatch=8, n_threads=1) as context,
        ):
            context.decode(PROMPT, 0)
            assert context.logits().tobytes() == expected.tobytes()
            last = tiers._residency.counters[-1]
            assert last[1] + last[2] == SMALL.top_k, "the last layer asks for one token's experts only"
            before = tiers.stats()
            tiers.acquire(0, []).release()
            assert tiers.stats() == before


def test_row_18_no_kernel_can_read_experts_from_a_mapped_file(engine, path):
    """The model's file is not mapped while its experts are served, and the engine's own tensors have no access."""

    def mapped(file: Path) -> bool:
        return str(file) in Path("/proc/self/maps").read_text()

    with make_tiers(path, FEW_SLOTS) as tiers, LlamaModel.open(engine, path, tiers=tiers) as model:
        reserved = [line for line in Path("/proc/self/maps").read_text().splitlines() if " ---p " in line]
        sizes = [int(line.split()[0].split("-")[1], 16) - int(line.split("-")[0], 16) for line in reserved]
        assert any(size >= tiers.table.expert_bytes_total for size in sizes)
        with model.context(n_ctx=64, n_threads=1) as context:
            context.decode(PROMPT, 0)
        assert not mapped(path)
    with LlamaModel.open(engine, path, repack=False):
        assert mapped(path), "this is how stock loads, and what the test would see"


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
                    LlamaModel.open(engine, file, tiers=tiers) as model,
                    model.context(n_ctx=128, n_threads=1) as context,
                ):
                    assert generated(context, PROMPT, 8) == expected[file]
        assert one.stats().l2.hits > 0
        assert two.stats().l2.hits > 0
        with (
            LlamaModel.open(engine, path, tiers=one) as first,
            LlamaModel.open(engine, other, tiers=two) as second,
            first.context(n_ctx=128, n_threads=1) as first_context,
            second.context(n_ctx=128, n_threads=1) as second_context,
        ):
            assert generated(first_context, PROMPT, 8) == expected[path]
            assert generated(second_context, PROMPT, 8) == expected[other]


@pytest.mark.parametrize("end", ["closed", "left open", "still running"])
def test_row_20_the_process_ends(engine, path, end):
    """Whether or not anything was closed, and it should even while a daemon thread generates."""
    script = f"""
        import sys, threading
        sys.path[:0] = {sys.path!r}
        from expertier.engine_adapter.llama_cpp import LlamaModel
        from expertier.engine_adapter.open_engine import open_engine
        from tiered_runs import make_tiers, prompt_tokens

        tiers = make_tiers({str(path)!r}, 3, host_pool_bytes=1 << 20)
        model = LlamaModel.open(open_engine(), {str(path)!r}, tiers=tiers)
        context = model.context(n_ctx=128, n_threads=1)
        first = threading.Event()

        def work():
            while True:
                context.forget()
                context.decode(prompt_tokens(40), 0)
                first.set()
                if {end != "still running"}:
                    break

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        assert first.wait(30)
        if {end != "still running"}:
            worker.join()
        if {end == "closed"}:
            context.close(), model.close(), tiers.close()
            assert tiers._device.device_bytes == tiers._device.pinned_bytes == 0
            assert threading.active_count() == 1, threading.enumerate()
        print("the end is near")
    """
    assert engine.proxy
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "the end is near\n"), ended.stderr


def test_row_21_a_refused_pinned_allocation_is_an_error(engine, path):
    """It fails the batch that needed it; the experts are neither computed elsewhere nor kept in other memory."""
    table = et.ExpertTable.from_gguf(path)
    faults = FaultPlan()
    with (
        HostDevice() as inner,
        et.TierManager(
            table, device=FaultyDevice(inner, faults), config=config_for(table, FEW_SLOTS, 8 << 20)
        ) as tiers,
        LlamaModel.open(engine, path, tiers=tiers) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        faults.arm("alloc_pinned", 3)
        with pytest.raises(DecodeError, match="alloc_pinned") as caught:
            context.decode(PROMPT, 0)
        assert isinstance(caught.value.__cause__, DeviceError)
        assert faults.injected["alloc_pinned"] == 1
        assert_nothing_held(tiers)
        assert inner.pinned_bytes == tiers.stats().l2.used_bytes + tiers.stats().l2.bounce_bytes
        assert generated(context, PROMPT, 4) == stock(engine, path, tuple(PROMPT), 4, 512)


def test_row_22_a_draft_model_does_not_get_the_main_models_tiers(engine, path, other):
    def requests(with_draft: bool) -> int:
        with make_tiers(path, 8) as tiers, LlamaModel.open(engine, path, tiers=tiers) as model:
            with model.context(n_ctx=128, n_threads=1) as context:
                if with_draft:
                    with pytest.raises(BusyError, match="bound already"):
                        LlamaModel.open(engine, path, tiers=tiers)
                    with pytest.raises((BusyError, EngineError)):
                        LlamaModel.open(engine, other, tiers=tiers)
                    with (
                        LlamaModel.open(engine, other, repack=False) as draft,
                        draft.context(n_ctx=128, n_threads=1) as drafting,
                    ):
                        assert draft.binding is None
                        assert generated(drafting, PROMPT, 4) == stock(engine, other, tuple(PROMPT), 4, 512)
                assert generated(context, PROMPT, 4) == stock(engine, path, tuple(PROMPT), 4, 512)
            return tiers.stats().l1.hits + tiers.stats().l1.misses

    assert requests(with_draft=True) == requests(with_draft=False)


def test_row_23_tiers_allocate_on_their_own_device(blocks):
    with HostDevice() as one, HostDevice() as two, tiers_on(one, blocks, 2, 4 * 4096) as first:
        assert (one.device_bytes, two.device_bytes) == (one.allocation_bytes(first.arena_bytes), 0)
        before = one.device_bytes, one.pinned_bytes
        with tiers_on(two, blocks, 5, 4 * 4096) as second:
            assert wrong_after(blocks, second, 0, range(10)) == []
            assert two.device_bytes >= second.arena_bytes > first.arena_bytes
            assert two.pinned_bytes > 0
        assert (one.device_bytes, one.pinned_bytes) == before
        assert two.device_bytes == two.pinned_bytes == 0


def test_row_24_nobody_sees_memory_that_is_gone(blocks):
    """Slots do not move under a lease, a lease ends once, and after a move nothing counts as resident."""
    with HostDevice() as device, tiers_on(device, blocks, 3) as tiers:
        lease = tiers.acquire(0, [1, 2])
        for change in (tiers.close, lambda: tiers.apply(LayerPlan((2, 2), 0, tiers.arena_bytes))):
            with pytest.raises(BusyError):
                change()
        assert blocks.wrong_bytes(lease, lease.held) == []
        lease.release()
        for use in (lease.release, lambda: lease.view("gate"), lambda: list(lease.parts)):
            with pytest.raises(LeaseError):
                use()
        for slots in ((2, 3), (3, 2)):
            tiers.apply(LayerPlan(slots, 0, tiers.arena_bytes))
            assert [tiers._residency.residents(layer) for layer in range(2)] == [{}, {}]
            misses = tiers.stats().l1.misses
            assert wrong_after(blocks, tiers, 0, [1, 2]) == []
            assert tiers.stats().l1.misses == misses + 2
    with pytest.raises(LeaseError, match="closed"):
        tiers.acquire(0, [1])


def test_row_25_later_prefills_copy_no_more_than_the_first(engine, path):
    """They copy less, and all of them the same; what the pool holds by then is not read again."""
    prompt = prompt_tokens(120)
    with (
        make_tiers(path, SMALL.experts // 2, host_pool_bytes=4 << 20) as tiers,
        LlamaModel.open(engine, path, tiers=tiers) as model,
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
    assert np.diff(read).tolist()[2:] == [0, 0, 0]
    assert len(set(pinned)) == 1, "memory was taken after the first prefill"


def test_row_26_the_engine_does_not_fit_what_we_have_placed(path, monkeypatch):
    """A tool is started with its own fitting off, after our budget was found good."""
    plugin = SimpleNamespace(proxy_path=Path("/nowhere/proxy.so"))
    monkeypatch.setattr(exec_tool, "prepare_engine", lambda *_: (None, plugin))
    monkeypatch.setattr(exec_tool, "_shared_python", lambda: Path("/nowhere/libpython.so"))
    command = ["true", "-m", str(path)]
    prepared = exec_tool.prepare_tool(command, environ={**os.environ, "LLAMA_ARG_FIT": "on"})
    assert prepared.environment["LLAMA_ARG_FIT"] == "off"
    assert "ffn_" in prepared.environment["LLAMA_ARG_OVERRIDE_TENSOR"]
    too_small = {**os.environ, "MOE_EXPERT_CACHE_MIB": "0.01"}
    with pytest.raises(BudgetError, match="at least"):
        exec_tool.prepare_tool(command, environ=too_small)


def test_row_27_what_is_used_or_in_flight_is_not_evicted(blocks):
    source = GatedSource(blocks.bytes)
    source.gate.set()
    workers = Workers()
    with HostDevice() as device, tiers_on(device, blocks, 3, source=source) as tiers:
        held = tiers.acquire(0, [4])
        slot = held.held.slots.tolist()
        address = held.view("gate").address
        source.gate.clear()
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
        churning.join(GLIMPSE_S)
        assert int(tiers._residency.slot_of[0, 5]) == filling, "an expert in flight was evicted"
        source.gate.set()
        workers.finish()
        assert in_flight == []
        assert set(taken).isdisjoint(slot)
        assert (held.held.slots.tolist(), held.view("gate").address) == (slot, address)
        assert blocks.wrong_bytes(held, held.held) == []
        tiers.check_valid()
        held.release()


def test_row_28_fewer_slots_than_a_batch_uses_are_enough(engine, path, caplog):
    """Down to one slot a layer, one token or many: passes, announced; none at all is refused when planned."""
    with make_tiers(path, 1) as tiers:
        assert "several passes" in caplog.text
        run = run_model(engine, path, tiers, prompt=PROMPT, n_tokens=8)
        assert run.counters.pass_calls == SMALL.layers * 9
        with pytest.raises(ValueError, match="need a slot each"):
            tiers.apply(LayerPlan((1, 0, 1), 0, tiers.arena_bytes))
        with pytest.raises(BudgetError):
            tiers.apply(LayerPlan((2, 2, 2), 0, tiers.arena_bytes))
    assert run.logits.tobytes() == stock(engine, path, tuple(PROMPT), 8, 512)


def test_row_29_the_budget_counts_what_the_allocator_takes(blocks):
    """An allocator that takes twice what is asked gets no more than the budget, all the same."""
    budget = 13 * 4096
    device = WatchedDevice(doubles=True)
    block_bytes = max(layout.block_bytes for layout in blocks.table.slot_layouts)
    assert device.allocation_bytes(block_bytes) > device.inner.allocation_bytes(block_bytes)
    with tiers_on(device, blocks, 2, budget) as tiers:
        bounce = device.inner.pinned_bytes
        for expert in (*range(10), *range(10)):
            for layer in range(2):
                assert wrong_after(blocks, tiers, layer, [expert % (10 - 4 * layer)]) == []
                assert device.inner.pinned_bytes - bounce == tiers.stats().l2.used_bytes <= budget
        assert tiers.stats().l2.used_bytes > 0
        tiers.check_valid()


@pytest.mark.parametrize("host_pool_bytes", [0, 1 << 20])
def test_row_30_copies_to_the_device_come_from_pinned_memory_only(engine, path, host_pool_bytes):
    table, device = et.ExpertTable.from_gguf(path), WatchedDevice()
    with et.TierManager(table, device=device, config=config_for(table, 3, host_pool_bytes)) as tiers:
        run_model(engine, path, tiers, prompt=PROMPT, n_tokens=4)
        assert device.n_copies >= tiers.stats().l1.misses > 0
        assert device.strangers == []


def test_row_31_every_byte_is_counted_once(blocks):
    demands, layouts = blocks.table.layer_demands(), blocks.table.slot_layouts
    budget = sum(demand.bytes_for(4) for demand in demands)
    plan = plan_layers(demands, budget_bytes=budget)
    ranges = sum(layout.range_bytes(n) for layout, n in zip(layouts, plan.slots, strict=True))
    assert plan.slots == (4, 4)
    assert ranges <= plan.used_bytes <= budget
    for host_pool_bytes in (0, 6 * 4096):  # the pool takes nothing from the slots
        with HostDevice() as device, tiers_on(device, blocks, 4, host_pool_bytes) as tiers:
            assert tiers.slots == plan.slots
            for layer in range(2):
                assert wrong_after(blocks, tiers, layer, range(6)) == []
            stats = tiers.stats()
            assert stats.l1.used_bytes == ranges
            assert device.device_bytes == device.allocation_bytes(budget)
            assert device.pinned_bytes == stats.l2.used_bytes + stats.l2.bounce_bytes
            copies = {key for key, _ in tiers._pool.copies()}
            blocks_bytes = sum(device.allocation_bytes(layouts[layer].block_bytes) for layer, _ in copies)
            assert stats.l2.used_bytes == blocks_bytes


@pytest.mark.parametrize("host_pool_bytes", [0, 1 << 20])
def test_row_32_a_failed_fill_leaves_no_trace_in_later_requests(engine, path, monkeypatch, host_pool_bytes):
    reads = FailingReads(monkeypatch)
    expected = stock(engine, path, tuple(PROMPT), 6, 512)
    with (
        make_tiers(path, 6, host_pool_bytes=host_pool_bytes) as tiers,
        LlamaModel.open(engine, path, tiers=tiers) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        for nth in (1, 2, 3, 14, 29):
            reads.fail_call(nth)
            context.forget()
            with pytest.raises(DecodeError, match=os.strerror(errno.EIO)) as caught:
                context.decode(PROMPT, 0)
            assert isinstance(caught.value.__cause__, SourceError)
            assert_nothing_held(tiers)
            for _ in range(2):
                assert generated(context, PROMPT, 6) == expected
            assert_nothing_held(tiers)
