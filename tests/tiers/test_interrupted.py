"""Calls of the tiers that an interrupt ends: each raises it and holds nothing afterwards, and the next call works.

Hits are interrupted at every instruction. Misses and other slow calls are interrupted at their first instructions,
which lead to the region that delays interrupts, and at a sample of the instructions after those;
`test_interrupted_anywhere.py` interrupts slow calls at every instruction.
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
from collections.abc import Callable
from pathlib import Path

import pytest

import expertier as et
from expertier.errors import LeaseError
from failures.held_source import HeldSource
from interruptions.interrupted_calls import (
    OPERATIONS,
    closed_at,
    everywhere,
    evict,
    groups,
    hit,
    miss,
    opened_or_not,
    release,
)
from interruptions.interrupted_tiers import (
    DEVICES,
    SOURCE,
    TABLE,
    assert_next_interrupt_is_raised,
    config,
    open_tiers,
)
from limits.waits import wait_until

FIRST_AND_SOME = [*range(1, 250), *range(250, 1 << 20, 97)]
LIMIT_S = 60.0

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.mark.parametrize("call", [hit, release])
@pytest.mark.parametrize("device", DEVICES)
def test_hits_interrupted_anywhere(device: str, call: Callable[[et.TierManager], None]) -> None:
    assert everywhere(device, config(), call) > 300


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("call", [miss, groups])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_somewhere(
    device: str, call: Callable[[et.TierManager], None], pool_experts: int
) -> None:
    n = everywhere(device, config(pool_experts=pool_experts), call, before=evict, at=FIRST_AND_SOME)
    assert n > 250


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_while_other_threads_fill(device: str, pool_experts: int) -> None:
    """What comes at which instruction differs from call to call then."""
    made = config(pool_experts=pool_experts, fill_threads=2)
    assert everywhere(device, made, groups, before=evict, at=range(1, 1 << 20, 61)) > 50


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_rest_interrupted_somewhere(name: str) -> None:
    call, before, undo = OPERATIONS[name]
    at = range(1, 1 << 20, 211)
    assert everywhere("fake", config(pool_experts=4), call, before=before, undo=undo, at=at) > 5


def test_opening_and_closing_interrupted_somewhere() -> None:
    n, opened = opened_or_not([*range(1, 60), *range(60, 1 << 20, 499)])
    assert n > 60
    assert opened == 0
    assert closed_at([*range(1, 60), *range(60, 1 << 20, 97)]) > 60


# ---- waits


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


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
            wait_until(lambda: len(tiers._usage.leases()) == 2)
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
        wait_until(lambda: source.reads > 0)

        def interrupt() -> None:
            wait_until(lambda: len(tiers._parts.workers._changed._waiters) > 0)  # type: ignore[attr-defined]
            interrupt_main()

        interrupting = in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiers.drain()
        assert tiers._parts.workers._background_running == 1, (
            "it has waited for the read, which ends by itself"
        )
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
            pid, status = os.waitpid(child, os.WNOHANG)  # no limit: it does not wait
            if pid:
                ended.append(os.waitstatus_to_exitcode(status))
            return bool(pid)

        try:
            wait_until(has_ended)
        finally:
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # no limit: it was killed
        assert ended == [len(calls)]
        lease.release()
        tiers.close()


WORKER = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from interruptions.interrupted_tiers import DEVICES, config, open_tiers
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
                time.sleep(moments.uniform(0, 0.003))  # a pause: they come at different moments of the loop
                process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 7, f"after {n} interrupts"
        assert n == 101
    finally:
        limit.cancel()
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()
