"""Several Python threads on the same layers: every lease shows the right bytes, nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import expertier as et
from expertier.errors import BusyError, SourceError
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.tiers.file.faulty_source import FaultySource
from expertier.tiers.model.span import Span
from limits.at_once import run_at_once
from limits.waits import Running, is_waiting, joined, wait_until, when_waiting
from model_files.gguf_files import Block, BytesSource, ModelFile, write_model

N_THREADS = 6
N_SLOTS = 4


pytestmark = pytest.mark.usefixtures("switch_often")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return write_model(
        tmp_path_factory.mktemp("model") / "m.gguf", [Block(n_experts=10), Block(n_experts=10)]
    )


class PausedSource:
    """A source whose reads wait until they are let through."""

    def __init__(self, data: bytes) -> None:
        self.inner = BytesSource(data)
        self.reading = threading.Event()
        self.may_read = threading.Event()
        self.reads = 0

    def read_into(self, span: Span, buffer: memoryview) -> None:
        self.reads += 1
        self.reading.set()
        assert self.may_read.wait(30)
        self.inner.read_into(span, buffer)


def make(model: ModelFile, device: HostDevice, source: object, pool_pages: int) -> et.TierManager:
    budget = sum(demand.bytes_for(N_SLOTS) for demand in model.table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_pages * 4096)
    return et.TierManager(model.table, device=device, config=config, source=source)


def run_threads(run: Callable[[int], None]) -> None:
    run_at_once([partial(run, number) for number in range(N_THREADS)])


def open_when_all_wait(source: PausedSource) -> None:
    """Let reads through once one thread of `run_threads` reads and the other threads wait for it."""

    def all_wait() -> bool:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("job-")]
        return len(threads) == N_THREADS and all(is_waiting(thread, "acquire") for thread in threads)

    wait_until(all_wait)
    source.may_read.set()


@pytest.mark.parametrize("pool_pages", [0, 3, 40])
def test_leases_of_many_threads_show_the_right_bytes(model: ModelFile, pool_pages: int) -> None:
    faults = FaultPlan()
    with HostDevice() as device:
        tiers = make(model, device, FaultySource(BytesSource(model.bytes), faults), pool_pages)
        failures = [0] * N_THREADS

        def run(number: int) -> None:
            rng = np.random.default_rng(number)
            for step in range(80):
                if step % 20 == number:
                    faults.arm("read", 1)
                layer = int(rng.integers(2))
                try:
                    with tiers.acquire(layer, rng.integers(0, 10, int(rng.integers(1, 8)))) as lease:
                        for group in lease.groups:
                            assert model.wrong_bytes(lease, group) == []
                except SourceError:
                    failures[number] += 1

        run_threads(run)
        faults.disarm()
        tiers.check_valid()
        assert 0 < sum(failures) <= faults.injected["read"]  # two experts of one call may have failed
        assert tiers._residency.pins_of(0) == tiers._residency.pins_of(1) == [0] * N_SLOTS
        tiers.close()


def test_threads_that_hold_leases_are_refused_rather_than_locked_up(model: ModelFile) -> None:
    with HostDevice() as device:
        tiers = make(model, device, BytesSource(model.bytes), 8)
        refused = [0] * N_THREADS

        def run(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(60):
                first, second = (0, 1) if number % 2 else (1, 0)
                with tiers.acquire(first, rng.integers(0, 10, 3)) as outer:
                    try:
                        with tiers.acquire(second, rng.integers(0, 10, 3)) as inner:
                            for group in inner.groups:
                                assert model.wrong_bytes(inner, group) == []
                    except BusyError:
                        refused[number] += 1
                    for group in outer.groups:
                        assert model.wrong_bytes(outer, group) == []

        run_threads(run)
        tiers.check_valid()
        tiers.close()


def test_one_expert_wanted_by_all_is_read_once(model: ModelFile) -> None:
    with HostDevice() as device:
        source = PausedSource(model.bytes)
        tiers = make(model, device, source, 8)

        def run(_: int) -> None:
            with tiers.acquire(0, [3]) as lease:
                assert lease.held is not None
                assert model.wrong_bytes(lease, lease.held) == []

        opening = Running(open_when_all_wait, source)
        run_threads(run)
        opening.outcome()
        assert source.reads == 3, "three matrices, once"
        assert tiers.stats().l1.misses == 1
        tiers.close()


def test_a_thread_without_leases_waits_for_slots(model: ModelFile) -> None:
    with HostDevice() as device:
        tiers = make(model, device, BytesSource(model.bytes), 0)
        held = tiers.acquire(0, range(N_SLOTS))
        waiting = Running(tiers.acquire, 0, [8, 9])
        waiting.must_wait_in("acquire")
        held.release()
        with waiting.outcome() as lease:
            assert lease.held is not None
            assert lease.held.experts.tolist() == [8, 9]
        tiers.close()


def test_holding_other_experts_does_not_hinder_a_wait_for_a_fill(model: ModelFile) -> None:
    with HostDevice() as device:
        source = PausedSource(model.bytes)
        source.may_read.set()
        tiers = make(model, device, source, 0)
        with tiers.acquire(0, [1]):
            source.may_read.clear()
            source.reading.clear()
            thread = threading.Thread(target=lambda: tiers.acquire(0, [2]).release(), daemon=True)
            thread.start()
            assert source.reading.wait(10)
            opening = when_waiting(threading.current_thread(), "acquire", source.may_read.set)
            with tiers.acquire(0, [2, 1]) as lease:
                assert lease.held is not None
                assert model.wrong_bytes(lease, lease.held) == []
            opening.outcome()
            joined(thread)
        tiers.close()


def test_nothing_moves_while_another_thread_acquires(model: ModelFile) -> None:
    with HostDevice() as device:
        source = PausedSource(model.bytes)
        tiers = make(model, device, source, 0)
        thread = threading.Thread(target=lambda: tiers.acquire(0, [2]).release(), daemon=True)
        thread.start()
        assert source.reading.wait(10)
        with pytest.raises(BusyError, match="leases are live"):
            tiers.close()
        source.may_read.set()
        joined(thread)
        tiers.close()
