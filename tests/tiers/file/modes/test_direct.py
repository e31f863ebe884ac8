"""Direct reads, file systems that refuse them, and errors that are no refusal."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from expertier.errors import SourceError
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.dio_alignment import DioAlignment
from expertier.tiers.file.modes import direct
from expertier.tiers.file.reader import RefusedError
from limits.waits import Running
from model_files.file_reads import DATA, is_open, open_source, read


def test_direct_reads_are_direct(direct_path: Path) -> None:
    flags: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return real(descriptor, buffers, offset)

    source = open_source(direct_path, FileMode.DIRECT)
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
    source = open_source(path, mode, room=lambda: 0)
    for offset in range(5):
        assert read(source, offset, 1000) == DATA[offset : offset + 1000]
    assert source.mode is FileMode.PAGE_CACHE
    assert source.stats().by_mode == {FileMode.PAGE_CACHE: (5, 5000)}
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if mode is FileMode.DIRECT else logging.INFO)
    assert f"{path} cannot be read directly" in record.getMessage()
    source.close()
    assert not is_open(path)


def test_threads_that_meet_a_refusal_at_once_say_it_once(
    direct_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source(direct_path, FileMode.DIRECT)
    both_there = threading.Barrier(2)

    def refuse(*_: object) -> NoReturn:
        both_there.wait(30)
        raise RefusedError(direct_path, "directly", "said to both threads")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.Reader, "read", refuse)
        reading = [Running(read, source, 5, 1000) for _ in range(2)]
        assert [running.outcome() for running in reading] == [DATA[5:1005]] * 2
    assert source.mode is FileMode.PAGE_CACHE
    assert len(caplog.records) == 1
    source.close()


def test_another_error_of_a_direct_open_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def fail(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))
        return real(name, flags)

    monkeypatch.setattr(os, "open", fail)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SourceError, match=r"cannot be opened: Too many open files \(errno 24\)"):
        open_source(path, FileMode.DIRECT)
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open


def test_a_direct_read_that_fails_is_not_tried_otherwise(
    direct_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(direct_path, FileMode.DIRECT)

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
        open_source(path, FileMode.DIRECT)
