"""`auto` against a clock: it goes where reads are faster, says so, and leaves the page cache as it was."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.direct_reader import DirectReader
from expertier.tiers.file.file_reads import ModeReads
from expertier.tiers.file.mode_chooser import TIMED_EVERY, TRIAL_EVERY
from expertier.tiers.file.modes import auto
from expertier.tiers.file.source import FileSource
from model_files.file_reads import DATA, SIZE, open_source, read


class Clock:
    """Time that passes by `step(descriptor is direct)` at each read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[bool], float]) -> None:
        self.now = 0.0
        self.step = step
        real = os.preadv

        def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            self.now += self.step(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    def __call__(self) -> float:
        return self.now


def reads(source: FileSource, mode: FileMode) -> ModeReads:
    return source.stats().by_mode.get(mode, ModeReads(0, 0))


def test_auto_goes_where_it_is_faster_and_says_so(
    direct_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(monkeypatch, lambda direct: 1.0 if direct else 3.0)
    source = open_source(direct_path, working_set_bytes=50_000, room=lambda: 60_000, clock=clock)
    assert source.mode is FileMode.PAGE_CACHE
    for i in range(2000):
        assert read(source, 7 * i, 1000) == DATA[7 * i : 7 * i + 1000]
    assert source.mode is FileMode.DIRECT
    (record,) = caplog.records
    assert record.getMessage().startswith("model.gguf is read directly from now on: ")
    clock.step = lambda direct: 5.0 if direct else 3.0
    for i in range(4000):
        read(source, 7 * i, 1000)
    stats = source.stats()
    assert (stats.mode, stats.mode_changes) == (FileMode.PAGE_CACHE, 2)
    assert 20 < stats.trial_reads <= 6000 // TRIAL_EVERY
    through_cache, directly = reads(source, FileMode.PAGE_CACHE), reads(source, FileMode.DIRECT)
    assert through_cache.reads + directly.reads == 6000
    assert through_cache.n_bytes == 1000 * through_cache.reads
    assert min(through_cache.reads, directly.reads) > 1000
    source.close()


@pytest.mark.parametrize(("again_s", "forgets"), [(1.0, True), (3.0, False)], ids=["from the disk", "cached"])
def test_a_trial_leaves_the_page_cache_as_it_found_it(
    direct_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float, forgets: bool
) -> None:
    forgotten: list[tuple[int, int]] = []

    def advise(_: int, offset: int, n_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        forgotten.append((offset, n_bytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    page_cache_s = itertools.cycle([3.0, again_s])
    clock = Clock(monkeypatch, lambda direct: 1.0 if direct else next(page_cache_s))
    source = open_source(direct_path, working_set_bytes=SIZE, room=lambda: 0, clock=clock)
    for _ in range(200):
        read(source, 100, 5000)
    stats = source.stats()
    assert stats.mode is FileMode.DIRECT
    assert stats.by_mode[FileMode.PAGE_CACHE].reads == stats.trial_reads
    assert stats.trial_reads > 1
    assert forgotten == [(100, 5000)] * (stats.trial_reads if forgets else 0)
    source.close()


def test_a_timed_read_that_the_file_system_refuses_goes_through_the_page_cache(
    direct_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its time counts for no mode."""
    source = open_source(direct_path, room=lambda: 0)
    assert source.mode is FileMode.DIRECT
    recorded: list[object] = []
    monkeypatch.setattr(auto.Reader, "_record", lambda *call: recorded.append(call))
    for offset in range(TIMED_EVERY - 1):
        read(source, offset, 1000)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(DirectReader, "read", refuse)
    assert read(source, 33, 1000) == DATA[33:1033]
    assert source.mode is FileMode.PAGE_CACHE
    assert recorded == []
    source.close()
