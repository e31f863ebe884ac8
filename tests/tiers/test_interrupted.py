"""Calls of the tiers that are interrupted at every instruction: each raises it, holds nothing, and the next one works.

`make test` has every instruction of hits, and of the slow ways those up to the region that keeps interrupts out and a
sample of the others; `make test-deep` has all of all.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertier as et
from expertier.errors import LeaseError
from expertier.planner.allocate import plan_layers
from expertier.testing import FakeDevice
from held_source import HeldSource
from interrupt_at import at_every_instruction, expertier_folders, standard_library
from interrupted_tiers import (
    DEVICES,
    N_EXPERTS,
    SOURCE,
    TABLE,
    assert_next_interrupt_is_raised,
    config,
    default_handler,
    interrupted_everywhere,
    open_tiers,
)

FOLDERS = [*expertier_folders(), *standard_library()]
ALL = range(1, 1 << 20)
FIRST_AND_SOME = [*range(1, 250), *range(250, 1 << 20, 97)]
LIMIT_S = 60.0

pytestmark = pytest.mark.usefixtures("_interrupts")


@pytest.fixture
def _interrupts() -> Iterator[None]:
    with default_handler():
        yield


def nothing(_: object) -> None:
    """Do nothing."""


# ---- acquire and release


def hit(tiers: et.TierManager) -> None:
    with tiers.acquire(0, [5, 6]):
        pass


def release(tiers: et.TierManager) -> None:
    tiers.acquire(0, [5, 6]).release()


def miss(tiers: et.TierManager) -> None:
    with tiers.acquire(1, [0, 1]):
        pass


def parts(tiers: et.TierManager) -> None:
    with tiers.acquire(1, range(N_EXPERTS)) as lease:
        for _ in lease.parts:
            pass


def evict(tiers: et.TierManager) -> None:
    tiers.acquire(1, [5, 6, 7]).release()


def everywhere(
    device_name: str,
    made: et.TierConfig,
    call: Callable[[et.TierManager], Any],
    *,
    before: Callable[[et.TierManager], Any] = nothing,
    undo: Callable[[et.TierManager], Any] = nothing,
    at: Any = ALL,
) -> int:
    """Interrupt a call at the instructions in `at`; return how many interrupts there were."""
    device = DEVICES[device_name]()
    with open_tiers(device, made) as tiers:
        for _ in range(2):  # whatever is made at a first use
            before(tiers)
            call(tiers)
            undo(tiers)
        return interrupted_everywhere(
            device,
            tiers,
            lambda: call(tiers),
            before=lambda: before(tiers),
            undo=lambda _: undo(tiers),
            at=at,
        )


@pytest.mark.parametrize("call", [hit, release])
@pytest.mark.parametrize("device", DEVICES)
def test_hits_interrupted_anywhere(device: str, call: Callable[[et.TierManager], None]) -> None:
    assert everywhere(device, config(), call) > 300


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("call", [miss, parts])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_somewhere(
    device: str, call: Callable[[et.TierManager], None], pool_experts: int
) -> None:
    n = everywhere(device, config(pool_experts=pool_experts), call, before=evict, at=FIRST_AND_SOME)
    assert n > 250


@pytest.mark.deep
@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("call", [miss, parts])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_anywhere(
    device: str, call: Callable[[et.TierManager], None], pool_experts: int
) -> None:
    assert everywhere(device, config(pool_experts=pool_experts), call, before=evict) > 2000


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_while_other_threads_fill(device: str, pool_experts: int) -> None:
    """What comes at which instruction differs from call to call then."""
    made = config(pool_experts=pool_experts, fill_threads=2)
    assert everywhere(device, made, parts, before=evict, at=range(1, 1 << 20, 61)) > 50


# ---- the rest


def prefetch(tiers: et.TierManager) -> None:
    tiers.prefetch(1, [0, 1, 2])
    tiers.prefetch(1, [3], into="l2")
    tiers.cancel_prefetches(0)
    tiers.drain()


def compute(tiers: et.TierManager) -> None:
    tiers.reserve_compute(4000)
    tiers.release_compute()
    tiers.settle()


def give_compute_back(tiers: et.TierManager) -> None:
    tiers.release_compute()
    tiers.settle()


def apply(tiers: et.TierManager) -> None:
    tiers.apply(plan_layers(TABLE.layer_demands(), budget_bytes=tiers.arena_bytes))
    tiers.rebalance()


def resize(tiers: et.TierManager) -> None:
    tiers.resize_host_pool(0)
    tiers.resize_host_pool(1 << 16)


def warm(tiers: et.TierManager) -> None:
    tiers.warm_start(np.arange(2 * N_EXPERTS).reshape(2, N_EXPERTS))
    tiers.fill_host_pool()
    tiers.drain()


def bind(tiers: et.TierManager) -> None:
    tiers.bind_engine()
    tiers.unbind_engine()


def fill(tiers: et.TierManager) -> None:
    """Fill a slot as an engine has it filled."""
    tiers.bind_engine()
    table, locks = tiers._residency, tiers._locks.address
    held = np.array([-1, -1, 0], np.int32)
    try:
        assert (
            table.take(locks, 1, np.array([0, 1], np.int32), held, np.zeros(2, np.int32), 0, waits=False) == 2
        )
        tiers.fill(1, [0, 1], held[:-1])
        table.complete_held(locks, 1, held)
        table.release_held(locks, 1, held)
    finally:
        table.abort_held(locks, 1, held)
        tiers.unbind_engine()


def unbind(tiers: et.TierManager) -> None:
    tiers.unbind_engine()


OPERATIONS: dict[str, tuple[Callable[[et.TierManager], Any], ...]] = {
    "prefetch": (prefetch, evict, nothing),
    "compute": (compute, nothing, give_compute_back),
    "apply": (apply, nothing, nothing),
    "resize": (resize, nothing, nothing),
    "warm": (warm, evict, nothing),
    "bind": (bind, nothing, unbind),
    "fill": (fill, evict, unbind),
}


@pytest.mark.deep
@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_rest_interrupted_anywhere(device: str, name: str, pool_experts: int) -> None:
    call, before, undo = OPERATIONS[name]
    assert everywhere(device, config(pool_experts=pool_experts), call, before=before, undo=undo) > 500


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_rest_interrupted_somewhere(name: str) -> None:
    call, before, undo = OPERATIONS[name]
    at = range(1, 1 << 20, 211)
    assert everywhere("fake", config(pool_experts=4), call, before=before, undo=undo, at=at) > 5


def opened_or_not(at: Any, fill_threads: int = 0) -> tuple[int, int]:
    """Interrupt opening at the instructions in `at`; return how many there were, and how many opened all the same."""
    n = opened = 0
    device = FakeDevice()
    tiers = object.__new__(et.TierManager)  # an interrupt may come when the constructor has ended

    def open_them() -> None:
        nonlocal tiers
        tiers = object.__new__(et.TierManager)
        tiers.__init__(  # type: ignore[misc]
            TABLE, device=device, config=config(pool_experts=4, fill_threads=fill_threads), source=SOURCE
        )

    for _ in range(2):
        open_them()
        tiers.close()
    for found in at_every_instruction(open_them, FOLDERS, at=at):
        assert isinstance(found.error, KeyboardInterrupt), f"{found.error!r} at {found.place}"
        if device.device_bytes:
            opened += 1
            hit(tiers)
            tiers.close()
        assert device.device_bytes == device.pinned_bytes == device.n_events == 0, found.place
        assert device.streams == (0,), found.place
        assert_next_interrupt_is_raised(found.place)
        n += 1
    tiers.close()
    device.close()
    return n, opened


def closed_at(at: Any) -> int:
    """Interrupt closing at the instructions in `at`; return how many there were."""
    n = 0
    device = FakeDevice()
    for nth in at:
        tiers = et.TierManager(TABLE, device=device, config=config(pool_experts=4), source=SOURCE)
        hit(tiers)
        left = list(at_every_instruction(tiers.close, FOLDERS, at=[nth]))
        assert device.device_bytes == device.pinned_bytes == device.n_events == 0, left
        assert device.streams == (0,), left
        if not left:
            break
        assert isinstance(left[0].error, KeyboardInterrupt), left
        assert_next_interrupt_is_raised(left[0].place)
        n += 1
    device.close()
    return n


def test_opening_and_closing_interrupted_somewhere() -> None:
    n, opened = opened_or_not([*range(1, 60), *range(60, 1 << 20, 499)])
    assert n > 60
    assert opened == 0
    assert closed_at([*range(1, 60), *range(60, 1 << 20, 97)]) > 60


@pytest.mark.deep
def test_opening_and_closing_interrupted_anywhere() -> None:
    n, opened = opened_or_not(ALL)
    assert n > 10_000
    assert opened < 5, "only after the last statement"
    assert closed_at(ALL) > 1000


# ---- waits


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_wait_for_slots_ends_with_an_interrupt() -> None:
    device = DEVICES["host"]()
    with open_tiers(device, config()) as tiers:
        leave = threading.Event()
        taken = threading.Event()

        def hold() -> None:
            with tiers.acquire(0, [0, 1, 2]):
                taken.set()
                leave.wait(LIMIT_S)

        holder = in_thread(hold)
        assert taken.wait(LIMIT_S)

        def interrupt() -> None:
            eventually(lambda: len(tiers._usage.leases()) == 2)
            interrupt_main()

        interrupting = in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiers.acquire(0, [3])
        interrupting.join(LIMIT_S)
        assert len(tiers._usage.leases()) == 1
        assert_next_interrupt_is_raised("in a wait for slots")
        leave.set()
        holder.join(LIMIT_S)
        tiers.check_valid()


def test_a_drain_ends_with_an_interrupt_while_a_read_takes_for_ever() -> None:
    source = HeldSource()
    with et.open_device("host") as device:
        tiers = et.TierManager(TABLE, device=device, config=config(fill_threads=1), source=source)
        source.open.clear()
        tiers.prefetch(0, [1])
        eventually(lambda: source.reads > 0)

        def interrupt() -> None:
            eventually(lambda: len(tiers._workers._changed._waiters) > 0)  # type: ignore[attr-defined]
            interrupt_main()

        interrupting = in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiers.drain()
        interrupting.join(LIMIT_S)
        source.open.set()
        tiers.drain()
        tiers.check_valid()
        tiers.close()


# ---- other processes


def test_a_forked_child_is_refused_and_not_left_waiting() -> None:
    """Its threads are gone, and locks that they held are held for ever."""
    with et.open_device("host") as device:
        tiers = et.TierManager(TABLE, device=device, config=config(fill_threads=2), source=SOURCE)
        lease = tiers.acquire(0, [1])
        tiers.prefetch(0, [2, 3])
        tiers.drain()
        calls: list[Callable[[], object]] = [
            lambda: tiers.acquire(0, [1]),
            lambda: tiers.prefetch(0, [5]),
            tiers.drain,
            lambda: tiers.reserve_compute(1000),
        ]
        with tiers._usage._lock, warnings.catch_warnings():  # held, as another thread might
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                n_refused = 0
                for call in calls:
                    try:
                        call()
                    except LeaseError as error:
                        n_refused += "forked" in str(error)
                tiers.close()
                os._exit(n_refused)
        ended: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                ended.append(os.waitstatus_to_exitcode(status))
            return bool(pid)

        try:
            eventually(has_ended)
        finally:
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert ended == [len(calls)]
        lease.release()
        tiers.close()


WORKER = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from interrupted_tiers import DEVICES, config, open_tiers
signal.signal(signal.SIGINT, signal.default_int_handler)
handled = 0
with open_tiers(DEVICES["host"](), config(pool_experts=4, fill_threads=2)) as tiers:
    tiers.acquire(0, [0]).release()
    while handled < 100:
        try:
            sys.stdout.write("."); sys.stdout.flush()
            while True:
                for first in range(7):
                    with tiers.acquire(first % 2, [first, first + 1]):
                        pass
        except KeyboardInterrupt:
            handled += 1
    tiers.check_valid()
    assert not tiers._residency.pins.any()
    try:
        print("!", flush=True)
        while True:
            tiers.acquire(0, [3, 4]).release()
    except KeyboardInterrupt:
        pass
sys.exit(7)
"""


def test_a_loop_of_handled_interrupts_in_acquire_can_still_be_interrupted() -> None:
    support = str(Path(__file__).parents[1] / "support")
    process = subprocess.Popen([sys.executable, "-c", WORKER, support], stdout=subprocess.PIPE)
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        n = 0
        moments = random.Random(16)
        while (told := process.stdout.read(1)) in (b".", b"!", b"\n"):
            if told != b"\n":
                n += 1
                time.sleep(moments.uniform(0, 0.003))  # so that they come at different moments of the loop
                process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 7, f"after {n} interrupts"
        assert n == 101
    finally:
        limit.cancel()
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()
