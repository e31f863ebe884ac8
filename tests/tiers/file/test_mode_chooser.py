"""Page cache or direct: a simulated disk and cache, with their own clock, show what is chosen and how often."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.mode_chooser import TIMED_EVERY, TRIAL_EVERY, Choice, ModeChooser, Purpose

SPAN = 1 << 20
CACHED = 3000 * 2**20  # bytes a second
UNCACHED = 600 * 2**20
DIRECT = 900 * 2**20


@dataclass
class Machine:
    """A disk, and a page cache of `cache_spans` that forgets what was used longest ago."""

    cache_spans: int
    said_spans: int | None = None
    """What the system says is left over, where that is not the cache's size."""
    uncached: float = UNCACHED
    direct: float = DIRECT
    cached: float = CACHED
    seconds: float = 0.0
    _cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def room(self) -> int:
        return (self.said_spans if self.said_spans is not None else self.cache_spans) * SPAN

    def forget(self, span: int) -> None:
        self._cache.pop(span, None)

    def read(self, span: int, mode: FileMode) -> float:
        """Return the seconds of a read."""
        if mode is FileMode.DIRECT:
            return SPAN / self.direct
        hit = span in self._cache
        self._cache[span] = None
        self._cache.move_to_end(span)
        while len(self._cache) > self.cache_spans:
            self._cache.popitem(last=False)
        return SPAN / (self.cached if hit else self.uncached)


def run(chooser: ModeChooser, machine: Machine, n_spans: int, n_reads: int, seed: int = 0) -> list[str]:
    """Read spans at random as `FileSource` does; return why the mode changed, each time."""
    rng = random.Random(seed)
    reasons: list[str] = []
    before = chooser.n_changes
    for _ in range(n_reads):
        span = rng.randrange(n_spans)
        choice = chooser.choose()
        seconds = machine.read(span, choice.mode)
        machine.seconds += seconds
        if choice.purpose is Purpose.PLAIN:
            continue
        again = None
        if choice.purpose is Purpose.TRIAL and choice.mode is FileMode.PAGE_CACHE:
            again = machine.read(span, choice.mode)
            machine.seconds += again
            if seconds > 2 * again:
                machine.forget(span)
        reason = chooser.record(choice, SPAN, seconds, again)
        if reason is not None:
            reasons.append(reason)
    assert len(reasons) == chooser.n_changes - before
    return reasons


def test_a_working_set_that_fits_stays_in_the_page_cache_while_it_fills() -> None:
    """Its first reads are slower than direct ones: that says nothing of the later ones."""
    machine = Machine(cache_spans=2000)
    chooser = ModeChooser(1500 * SPAN, machine.room)
    assert chooser.mode is FileMode.PAGE_CACHE
    assert run(chooser, machine, 1500, 20_000) == []


def test_a_working_set_far_beyond_the_ram_is_read_directly() -> None:
    machine = Machine(cache_spans=200)
    chooser = ModeChooser(4000 * SPAN, machine.room)
    assert chooser.mode is FileMode.DIRECT
    assert run(chooser, machine, 4000, 20_000) == []


def test_a_cache_that_serves_most_reads_pays_though_it_does_not_hold_all() -> None:
    """Direct at first; trials show that two of three reads would be served from RAM, and so it comes."""
    machine = Machine(cache_spans=2000)
    chooser = ModeChooser(3000 * SPAN, machine.room)
    assert chooser.mode is FileMode.DIRECT
    (reason,) = run(chooser, machine, 3000, 40_000)
    assert reason == (
        "through the page cache from now on: 900.0 MiB/s directly, 1285.7 MiB/s through the page cache, "
        "2000.0 MiB of RAM left for 3000.0 MiB of experts"
    )
    assert chooser.mode is FileMode.PAGE_CACHE


def test_a_neighbour_takes_the_ram_and_gives_it_back() -> None:
    machine = Machine(cache_spans=2000)
    chooser = ModeChooser(2000 * SPAN, machine.room)
    assert run(chooser, machine, 2000, 8000) == []
    machine.cache_spans = 300
    assert len(run(chooser, machine, 2000, 20_000)) == 1
    assert chooser.mode is FileMode.DIRECT
    machine.cache_spans = 2000
    assert len(run(chooser, machine, 2000, 20_000)) == 1
    assert chooser.mode is FileMode.PAGE_CACHE
    assert run(chooser, machine, 2000, 20_000) == []


def test_ram_that_is_said_to_be_free_and_is_not_is_tried_ever_more_seldom() -> None:
    machine = Machine(cache_spans=100, said_spans=5000)
    chooser = ModeChooser(2000 * SPAN, machine.room)
    assert chooser.mode is FileMode.PAGE_CACHE
    run(chooser, machine, 2000, 20_000)
    assert (chooser.mode, chooser.n_changes) == (FileMode.DIRECT, 1)
    before = machine.seconds
    run(chooser, machine, 2000, 180_000)
    assert chooser.mode is FileMode.DIRECT
    assert chooser.n_changes == 5, "twice tried again"
    assert machine.seconds - before < 1.05 * 180_000 * SPAN / DIRECT


def test_a_disk_whose_direct_reads_get_slow_is_left() -> None:
    machine = Machine(cache_spans=100, said_spans=5000)
    chooser = ModeChooser(2000 * SPAN, machine.room)
    run(chooser, machine, 2000, 20_000)
    assert chooser.mode is FileMode.DIRECT
    machine.direct = 200 * 2**20
    assert len(run(chooser, machine, 2000, 40_000)) == 1
    assert chooser.mode is FileMode.PAGE_CACHE


@settings(max_examples=30)
@given(
    cache_spans=st.integers(0, 300),
    n_spans=st.integers(1, 300),
    cached=st.integers(500, 5000),
    uncached=st.integers(50, 1500),
    direct=st.integers(50, 1500),
    seed=st.integers(0, 9),
)
def test_where_nothing_changes_it_settles_on_what_is_nearly_the_faster_one(
    cache_spans: int, n_spans: int, cached: int, uncached: int, direct: int, seed: int
) -> None:
    machine = Machine(
        cache_spans,
        uncached=min(uncached, cached) * 2**20,
        direct=direct * 2**20,
        cached=cached * 2**20,
    )
    chooser = ModeChooser(n_spans * SPAN, machine.room)
    run(chooser, machine, n_spans, 8_000, seed)
    assert chooser.n_changes <= 3
    chosen = chooser.mode
    run(chooser, machine, n_spans, 2_000, seed + 1)
    assert chooser.mode is chosen or chooser.n_changes <= 3

    share = min(cache_spans / n_spans, 1.0)
    page_cache = 1 / (share / machine.cached + (1 - share) / machine.uncached)
    speeds = {FileMode.PAGE_CACHE: page_cache, FileMode.DIRECT: machine.direct}
    assert speeds[chooser.mode] >= max(speeds.values()) / 1.45


def test_the_same_history_gives_the_same_choices() -> None:
    def history() -> tuple[list[str], float]:
        machine = Machine(cache_spans=700)
        chooser = ModeChooser(1000 * SPAN, machine.room)
        return run(chooser, machine, 1000, 10_000), machine.seconds

    assert history() == history()


def test_shares_of_timed_reads_and_trials() -> None:
    chooser = ModeChooser(10, lambda: 100)
    choices = [chooser.choose() for _ in range(TIMED_EVERY * TRIAL_EVERY)]
    trials = [choice for choice in choices if choice.purpose is Purpose.TRIAL]
    assert {choice.mode for choice in trials} == {FileMode.DIRECT}
    assert len(trials) == TIMED_EVERY
    assert sum(choice.purpose is Purpose.TIMED for choice in choices) == TRIAL_EVERY - 1
    assert {choice.mode for choice in choices if choice not in trials} == {FileMode.PAGE_CACHE}


def test_trials_cost_little_where_the_page_cache_gives_everything_at_once() -> None:
    machine = Machine(cache_spans=500, cached=20_000 * 2**20)
    chooser = ModeChooser(500 * SPAN, machine.room)
    run(chooser, machine, 500, 10_000)
    before = machine.seconds
    run(chooser, machine, 500, 20_000)
    assert machine.seconds - before < 1.03 * 20_000 * SPAN / machine.cached


@pytest.mark.parametrize("room", [0, 100])
def test_a_clock_that_stands_still_decides_nothing(room: int) -> None:
    chooser = ModeChooser(10, lambda: room)
    before = chooser.mode
    for _ in range(5000):
        choice = chooser.choose()
        if choice.purpose is not Purpose.PLAIN:
            assert chooser.record(choice, 1, 0.0, 0.0) is None
    assert chooser.mode is before


def test_a_read_that_began_before_the_mode_changed_counts_where_it_was_done() -> None:
    chooser = ModeChooser(10, lambda: 100)
    late = Choice(FileMode.DIRECT, Purpose.TIMED)
    assert chooser.record(late, 100, 1.0) is None
    assert chooser.mode is FileMode.PAGE_CACHE
