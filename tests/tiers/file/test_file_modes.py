"""The file through the page cache, directly, and by `auto`; file systems that have no direct reads; closing."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

import expertier as et
from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.tiers import assemble as assemble_module
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file import open_file as open_file_module
from expertier.tiers.file.dio_alignment import DioAlignment
from expertier.tiers.file.direct_reader import DirectReader
from expertier.tiers.file.file_reads import ModeReads
from expertier.tiers.file.mode_chooser import TIMED_EVERY, TRIAL_EVERY
from expertier.tiers.file.modes import auto, direct
from expertier.tiers.file.reader import RefusedError
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.span import Span
from model_files.gguf_files import Block, write_model

SIZE = 100_003
DATA = random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def opened(path: Path, mode: FileMode = FileMode.AUTO, **how: object) -> FileSource:
    return FileSource([ModelFile(path, 0, FileIdentity.of(path.stat()))], mode, **how)  # type: ignore[arg-type]


def read(source: FileSource, offset: int, n_bytes: int) -> bytes:
    buffer = bytearray(n_bytes)
    source.read_into(Span(offset, n_bytes), memoryview(buffer))
    return bytes(buffer)


def reads(source: FileSource, mode: FileMode) -> ModeReads:
    return source.stats().by_mode.get(mode, ModeReads(0, 0))


def has_direct_reads(path: Path) -> bool:
    source = opened(path, FileMode.DIRECT)
    try:
        read(source, 1, 1000)
        return source.mode is FileMode.DIRECT
    finally:
        source.close()


@pytest.mark.parametrize("mode", FileMode)
def test_every_mode_gives_the_same_bytes(path: Path, mode: FileMode) -> None:
    source = opened(path, mode)
    rng = random.Random(1)
    for _ in range(200):
        offset = rng.randrange(SIZE)
        n_bytes = rng.randrange(min(SIZE - offset, 30_000) + 1)
        assert read(source, offset, n_bytes) == DATA[offset : offset + n_bytes]
    with pytest.raises(SourceError, match=r"offset 100000, got 3 \(errno 0\): the file ends there"):
        read(source, 100_000, 4)
    with pytest.raises(SourceError, match=r"got 0 \(errno 0\): the file ends there"):
        read(source, 200_000, 4)
    assert sum(of_mode.reads for of_mode in source.stats().by_mode.values()) == 200
    source.close()
    assert source.stats().scratch_bytes == 0


def test_direct_reads_are_direct(path: Path) -> None:
    if not has_direct_reads(path):
        pytest.skip("this file system has no direct reads")
    flags: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return real(descriptor, buffers, offset)

    source = opened(path, FileMode.DIRECT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        assert read(source, 33, 70_000) == DATA[33:70_033]
    assert flags
    assert all(flags)
    stats = source.stats()
    assert stats.by_mode == {FileMode.DIRECT: (1, 70_000)}
    assert 0 < stats.scratch_bytes <= 5 << 20
    source.close()


@pytest.mark.parametrize("mode", [FileMode.DIRECT, FileMode.AUTO])
@pytest.mark.parametrize("refuses", ["open", "alignment", "read"])
def test_a_file_system_without_direct_reads_is_said_once(
    path: Path,
    mode: FileMode,
    refuses: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    real_open, real_preadv = os.open, os.preadv

    def refuse_open(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(name))
        return real_open(name, flags)

    def refuse_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", refuse_open)
    alignment = None if refuses == "alignment" else DioAlignment(512, 512)
    monkeypatch.setattr(direct, "dio_alignment", lambda _: alignment)
    if refuses == "read":
        monkeypatch.setattr(os, "preadv", refuse_read)
    source = opened(path, mode, room=lambda: 0)
    for offset in range(5):
        assert read(source, offset, 1000) == DATA[offset : offset + 1000]
    assert source.mode is FileMode.PAGE_CACHE
    assert source.stats().by_mode == {FileMode.PAGE_CACHE: (5, 5000)}
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if mode is FileMode.DIRECT else logging.INFO)
    assert f"{path} cannot be read directly" in record.getMessage()
    source.close()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]


def test_another_error_of_a_direct_open_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def fail(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))
        return real(name, flags)

    monkeypatch.setattr(os, "open", fail)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SourceError, match=r"cannot be opened: Too many open files \(errno 24\)"):
        opened(path, FileMode.DIRECT)
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open


def test_a_direct_read_that_fails_is_not_tried_otherwise(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_direct_reads(path):
        pytest.skip("this file system has no direct reads")
    source = opened(path, FileMode.DIRECT)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError, match=r"failed after 0: Input/output error \(errno 5\); check the disk"):
        read(source, 0, 1000)
    monkeypatch.undo()
    assert read(source, 0, 1000) == DATA[:1000]
    assert source.mode is FileMode.DIRECT


def test_another_file_in_its_place_at_the_second_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def swapped(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            other = path.with_name("other")
            other.write_bytes(DATA)
            other.replace(path)
        return real(name, flags & ~os.O_DIRECT)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(SourceError, match="another file took its place"):
        opened(path, FileMode.DIRECT)


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


def test_auto_goes_where_it_is_faster_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not has_direct_reads(path):
        pytest.skip("this file system has no direct reads")
    caplog.set_level(logging.INFO)
    clock = Clock(monkeypatch, lambda direct: 1.0 if direct else 3.0)
    source = opened(path, working_set_bytes=50_000, room=lambda: 60_000, clock=clock)
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
    path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float, forgets: bool
) -> None:
    if not has_direct_reads(path):
        pytest.skip("this file system has no direct reads")
    forgotten: list[tuple[int, int]] = []

    def advise(_: int, offset: int, n_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        forgotten.append((offset, n_bytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    page_cache_s = itertools.cycle([3.0, again_s])
    clock = Clock(monkeypatch, lambda direct: 1.0 if direct else next(page_cache_s))
    source = opened(path, working_set_bytes=SIZE, room=lambda: 0, clock=clock)
    for _ in range(200):
        read(source, 100, 5000)
    stats = source.stats()
    assert stats.mode is FileMode.DIRECT
    assert stats.by_mode[FileMode.PAGE_CACHE].reads == stats.trial_reads
    assert stats.trial_reads > 1
    assert forgotten == [(100, 5000)] * (stats.trial_reads if forgets else 0)
    source.close()


def test_hints_change_nothing_but_speed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(path, FileMode.PAGE_CACHE)
    asked: list[tuple[int, int]] = []
    cached: set[int] = set()

    def try_read(_fd: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if offset not in cached:
            raise BlockingIOError
        return len(buffers[0])

    monkeypatch.setattr(open_file_module, "_try_read", try_read)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _fd, offset, n_bytes, _advice: asked.append((offset, n_bytes))
    )
    source.will_need([Span(5, 10), Span(1000, 2000)])
    assert asked == [(5, 10), (1000, 2000)]
    cached.add(2000)
    asked.clear()
    source.will_need([Span(5, 10), Span(1000, 2000)])
    assert asked == [(5, 10)], "the other one is there already"

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fadvise", fail)
    source.will_need([Span(5, 10)])
    assert read(source, 5, 10) == DATA[5:15]
    source.close()
    source.will_need([Span(5, 10)])
    with opened_direct(path) as direct:
        direct.will_need([Span(5, 10)])


class opened_direct:  # noqa: N801 (a context manager for one test)
    def __init__(self, path: Path) -> None:
        self.source = opened(path, FileMode.DIRECT)

    def __enter__(self) -> FileSource:
        return self.source

    def __exit__(self, *_: object) -> None:
        self.source.close()


@pytest.mark.parametrize("mode", [FileMode.PAGE_CACHE, FileMode.DIRECT])
def test_closing_while_a_read_runs(path: Path, mode: FileMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read ends with the right bytes from its own descriptor, and only then are the files closed."""
    source = opened(path, mode)
    reading, closed = threading.Event(), threading.Event()
    real = os.preadv

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert closed.wait(30)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read(source, 50, 5000)), daemon=True)
    thread.start()
    assert reading.wait(30)
    source.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]  # would get the numbers that closing frees
    with pytest.raises(SourceError, match="the source was closed; open the tiers again"):
        read(source, 0, 1)
    closed.set()
    thread.join(30)
    assert not thread.is_alive()
    assert found == [DATA[50:5050]]
    for descriptor in others:
        os.close(descriptor)
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]


@pytest.mark.parametrize("mode", FileMode)
def test_many_threads_and_a_close(path: Path, mode: FileMode) -> None:
    source = opened(path, mode, room=lambda: 0)
    errors: list[BaseException] = []
    refusals: list[str] = []
    counter = itertools.count()
    lock = threading.Lock()
    n_reads = 0

    def work(seed: int) -> None:
        nonlocal n_reads
        rng = random.Random(seed)
        try:
            while True:
                offset, n_bytes = rng.randrange(SIZE - 9000), rng.randrange(9000)
                try:
                    found = read(source, offset, n_bytes)
                except SourceError as error:
                    refusals.append(str(error))
                    return
                assert found == DATA[offset : offset + n_bytes]
                with lock:
                    n_reads += 1
                if next(counter) == 600:
                    source.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert len(refusals) == 6
    assert all("the source was closed" in refusal for refusal in refusals)
    assert sum(of_mode.reads for of_mode in source.stats().by_mode.values()) == n_reads > 600
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]


@pytest.mark.parametrize("mode", FileMode)
def test_the_tiers_read_as_they_are_told(tmp_path: Path, mode: FileMode) -> None:
    model = write_model(tmp_path / "m.gguf", [Block()])
    budget = sum(demand.bytes_for(2) for demand in model.table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, file_mode=mode)
    made: list[FileMode] = []

    class Watched(FileSource):
        def __init__(self, files: Sequence[ModelFile], mode: FileMode, *, working_set_bytes: int) -> None:
            assert working_set_bytes == model.table.expert_bytes_total
            made.append(mode)
            super().__init__(files, mode, working_set_bytes=working_set_bytes)

    with pytest.MonkeyPatch.context() as patch, HostDevice() as device:
        patch.setattr(assemble_module, "FileSource", Watched)
        with et.TierManager(model.table, device=device, config=config) as tiers:
            for expert in range(8):
                with tiers.acquire(0, [expert]) as lease:
                    assert lease.held is not None
                    assert model.wrong_bytes(lease, lease.held) == []
    assert made == [mode]


def test_threads_that_meet_a_refusal_at_once_say_it_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not has_direct_reads(path):
        pytest.skip("this file system has no direct reads")
    source = opened(path, FileMode.DIRECT)
    both_there = threading.Barrier(2)

    def refuse(*_: object) -> NoReturn:
        both_there.wait(30)
        raise RefusedError(path, "directly", "said to both threads")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.Reader, "read", refuse)
        found: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: found.append(read(source, 5, 1000)), daemon=True)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert found == [DATA[5:1005]] * 2
    assert source.mode is FileMode.PAGE_CACHE
    assert len(caplog.records) == 1
    source.close()


def test_a_timed_read_that_the_file_system_refuses_goes_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its time counts for no mode."""
    if not has_direct_reads(path):
        pytest.skip("this file system has no direct reads")
    source = opened(path, room=lambda: 0)
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
