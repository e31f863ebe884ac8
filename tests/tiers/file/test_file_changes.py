"""The model's file changes while it is read: an error that names the change, never other bytes."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import expertier as et
from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.span import Span
from limits.waits import Running
from model_files.file_reads import as_model_file, open_source
from model_files.gguf_files import Block, write_model

SIZE = 20_000
MODES = [FileMode.PAGE_CACHE, FileMode.DIRECT]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(250)) * (SIZE // 250))
    return path


def overwrite(path: Path) -> None:
    """Other bytes at equal size, where they are."""
    with path.open("r+b") as file:
        file.write(b"\xff" * SIZE)


def overwrite_one_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(SIZE - 1)
        file.write(b"\xff")


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def cut(path: Path) -> None:
    os.truncate(path, 15_000)


def cut_and_fill_up(path: Path) -> None:
    os.truncate(path, 100)
    os.truncate(path, SIZE)


def overwrite_and_put_the_time_back(path: Path) -> None:
    """As `rsync --inplace --times` does; again where the system's clock had not moved on."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        overwrite(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [
    (overwrite_and_put_the_time_back, "something changed it since (ctime)"),
    (overwrite, "it was written to"),
    (overwrite_one_byte, "it was written to"),
    (cut_and_fill_up, "it was written to"),
    (grow, "its size was 20000 bytes and is 20004"),
    (cut, "its size was 20000 bytes and is 15000"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_changed_file_is_refused_at_every_read(
    path: Path, mode: FileMode, change: Callable[[Path], None], said: str
) -> None:
    source = open_source(path, mode)
    buffer = memoryview(bytearray(1000))
    source.read_into(Span(500, 1000), buffer)
    change(path)
    for _ in range(2):
        with pytest.raises(SourceError) as caught:
            source.read_into(Span(500, 1000), buffer)
        assert str(path) in str(caught.value)
        assert "asked for 1000 bytes at offset 500" in str(caught.value)
        assert said in str(caught.value)
    source.close()


def rename(path: Path) -> None:
    path.rename(path.with_name("renamed"))


def rename_twice(path: Path) -> None:
    path.rename(path.with_name("for a moment")).rename(path.with_name("another name"))


def link(path: Path) -> None:
    os.link(path, path.with_name("link"))


def remove(path: Path) -> None:
    path.unlink()


def take_rights(path: Path) -> None:
    path.chmod(0o400)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [rename, rename_twice, link, remove, take_rights])
def test_a_new_name_or_other_rights_are_no_change(
    path: Path, mode: FileMode, change: Callable[[Path], None]
) -> None:
    """The system changes `ctime` for them as well; who holds the file open goes on to read it."""
    source = open_source(path, mode)
    before, buffer = path.read_bytes(), memoryview(bytearray(1000))
    writer = os.open(path, os.O_RDWR)
    ctime = os.fstat(writer).st_ctime_ns
    change(path)
    spin_until(lambda: os.fstat(writer).st_ctime_ns != ctime, lambda: os.fchmod(writer, 0o444))
    for _ in range(2):
        source.read_into(Span(500, 1000), buffer)
        assert buffer == before[500:1500]
    status = os.fstat(writer)
    spin_until(
        lambda: os.fstat(writer).st_ctime_ns != status.st_ctime_ns,
        lambda: (
            os.pwrite(writer, b"\xff", 0),
            os.utime(writer, ns=(status.st_atime_ns, status.st_mtime_ns)),
        ),
    )
    os.close(writer)
    with pytest.raises(SourceError, match=r"something changed it since \(ctime\)"):
        source.read_into(Span(500, 1000), buffer)
    source.close()


def spin_until(done: Callable[[], bool], again: Callable[[], object]) -> None:
    """Do something again until the system's clock of files has moved on, some milliseconds."""
    while not done():
        again()


def test_many_readers_see_one_new_name(path: Path) -> None:
    """Whoever judges the change second must not take it for one without a reason."""
    source = open_source(path, FileMode.PAGE_CACHE)
    ctime = path.stat().st_ctime_ns
    started = threading.Barrier(9, timeout=30)
    failures: list[SourceError] = []

    def read() -> None:
        buffer = memoryview(bytearray(100))
        started.wait(30)
        for _ in range(300):
            try:
                source.read_into(Span(0, 100), buffer)
            except SourceError as error:
                failures.append(error)

    readers = [Running(read) for _ in range(8)]
    started.wait(30)
    new = path.rename(path.with_name("renamed"))
    spin_until(lambda: new.stat().st_ctime_ns != ctime, lambda: new.chmod(0o640))
    for reader in readers:
        reader.outcome()
    assert failures == []
    source.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_is_written_to_during_the_read(
    path: Path, mode: FileMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are the new ones, or some of each: the check comes after them."""
    source = open_source(path, mode)
    real = os.preadv

    def overwritten_meanwhile(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        overwrite(path)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", overwritten_meanwhile)
    with pytest.raises(SourceError, match="the file changed since its header was read: it was written to"):
        source.read_into(Span(500, 1000), memoryview(bytearray(1000)))


def test_only_the_changed_shard_is_refused(path: Path) -> None:
    second = path.with_name("second")
    second.write_bytes(bytes(100))
    source = FileSource([as_model_file(path), as_model_file(second, SIZE)])
    grow(path)
    buffer = memoryview(bytearray(100))
    source.read_into(Span(SIZE, 100), buffer)
    with pytest.raises(SourceError, match="bytes: asked for 100 bytes at offset 0"):
        source.read_into(Span(0, 100), buffer)


def test_a_state_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path, FileMode.PAGE_CACHE)
    stat = os.fstat

    def fail(*_: object) -> int:
        monkeypatch.setattr(os, "fstat", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError, match=r"errno 5.*its state cannot be read: Input/output error"):
        source.read_into(Span(0, 1), memoryview(bytearray(1)))
    monkeypatch.setattr(os, "fstat", stat)
    source.close()


def test_through_the_tiers(tmp_path: Path) -> None:
    """No lease ever shows bytes of the new file; what was fetched before still serves, with the old ones."""
    model = write_model(tmp_path / "m.gguf", [Block()])
    budget = sum(demand.bytes_for(4) for demand in model.table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
    with HostDevice() as device, et.TierManager(model.table, device=device, config=config) as tiers:
        tiers.acquire(0, [0, 1]).release()
        with model.path.open("r+b") as file:
            file.write(b"\xff" * len(model.bytes))
        with pytest.raises(
            SourceError, match=r"m\.gguf: .* changed since its header was read: it was written to"
        ):
            tiers.acquire(0, [1, 7])
        tiers.check_valid()
        with tiers.acquire(0, [0, 1]) as lease:
            assert lease.held is not None
            assert model.wrong_bytes(lease, lease.held) == []


def test_many_readers_of_a_file_that_is_overwritten(path: Path) -> None:
    """Every read either gives the old bytes or fails, whatever the moment of the change."""
    source = open_source(path, FileMode.AUTO)
    before = path.read_bytes()
    wrong: list[int] = []
    failures: list[SourceError] = []
    started = threading.Barrier(5)

    def read(seed: int) -> None:
        buffer = memoryview(bytearray(300))
        started.wait(30)
        for i in range(300):
            offset = (seed * 7919 + i * 104_729) % (SIZE - 300)
            try:
                source.read_into(Span(offset, 300), buffer)
            except SourceError as error:
                failures.append(error)
                return
            if buffer != before[offset : offset + 300]:
                wrong.append(offset)

    readers = [Running(read, seed) for seed in range(4)]
    started.wait(30)
    overwrite(path)
    for reader in readers:
        reader.outcome()
    assert wrong == []
    with pytest.raises(SourceError, match="it was written to"):
        source.read_into(Span(0, 1), memoryview(bytearray(1)))
    source.close()


@pytest.mark.parametrize("field", ["n_bytes", "mtime_ns", "ctime_ns", "inode", "device"])
def test_each_part_of_an_identity_counts(path: Path, field: str) -> None:
    identity = FileIdentity.of(path.stat())
    assert identity.matches(path.stat())
    assert identity.difference(identity) is None
    other = dataclasses.replace(identity, **{field: getattr(identity, field) + 1})
    assert not other.matches(path.stat())
    assert other.difference(identity) is not None
