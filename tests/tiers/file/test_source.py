"""The file as a source of bytes, and what it says when the file is not what it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from expertier.errors import SourceError
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.file.counted_source import CountedSource
from expertier.tiers.file.faulty_source import FaultySource
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.span import Span
from model_files.file_reads import as_model_file, open_source, read
from model_files.gguf_files import BytesSource


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def test_reads_what_is_there(path: Path) -> None:
    source = open_source(path)
    assert read(source, 250, 12) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3, 4, 5])
    assert read(source, 10_240, 0) == b""
    source.close()
    source.close()


def test_short_reads_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    assert read(open_source(path), 100, 100) == bytes(range(100, 200))


def test_the_end_of_the_file(path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"bytes: asked for 20 bytes at offset 10230, got 10 .*the file ends there"
    ):
        read(open_source(path), 10_230, 20)


def test_a_file_that_shrank(path: Path) -> None:
    source = open_source(path)
    os.truncate(path, 100)
    with pytest.raises(SourceError, match="its size was 10240 bytes and is 100"):
        read(source, 90, 20)


def test_a_read_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError, match=r"at offset 3, failed after 0: Input/output error \(errno 5\)"):
        read(source, 3, 4)


def test_a_closed_source(path: Path) -> None:
    source = open_source(path)
    source.close()
    with pytest.raises(SourceError, match="the source was closed"):
        read(source, 0, 1)


def test_a_missing_file(path: Path) -> None:
    identity = FileIdentity.of(path.stat())
    path.unlink()
    with pytest.raises(SourceError, match=r"cannot be opened: No such file or directory \(errno 2\)"):
        FileSource([ModelFile(path, 0, identity)])


def test_a_file_that_changed_before_it_was_opened(path: Path) -> None:
    identity = FileIdentity.of(path.stat())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))

    def change(message: str) -> None:
        with pytest.raises(SourceError, match=f"changed after its header was read: {message}"):
            FileSource([ModelFile(path, 0, identity)])

    path.write_bytes(b"x")
    change("its size was 10240 bytes and is 1;")
    path.write_bytes(bytes(10_240))
    os.utime(path, ns=(identity.mtime_ns + 10**9,) * 2)
    change("it was written to")
    other = path.with_name("other")
    other.write_bytes(bytes(10_240))
    other.replace(path)
    change("another file took its place")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize("change", ["replaced", "gone", "locked"])
def test_what_happens_to_the_name_of_an_open_file_does_not_matter(path: Path, change: str) -> None:
    """The source holds the file, not its name: a download that replaces it by renaming leaves the old one to us."""
    source = open_source(path)
    before = read(source, 0, 10_240)
    if change == "replaced":
        other = path.with_name("other")
        other.write_bytes(bytes(10_240))
        other.replace(path)
    elif change == "gone":
        path.unlink()
    else:
        path.chmod(0)
    assert read(source, 0, 10_240) == before
    source.close()


@pytest.mark.parametrize("change", ["replaced", "grown"])
def test_what_a_failed_read_says_of_a_changed_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = open_source(path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if change == "grown":
        with open(path, "ab") as file:
            file.write(b"more")
    else:
        path.unlink()
    monkeypatch.setattr(os, "preadv", fail)
    expected = "its size was 10240 bytes and is 10244" if change == "grown" else "check the disk"
    with pytest.raises(SourceError, match=rf"failed after 0: Input/output error \(errno 5\); {expected}"):
        read(source, 0, 1)


def test_permission_lost_before_it_is_opened_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening fails as it does for a user who is not root; the files opened before it are closed again."""
    second = path.with_name("second")
    second.write_bytes(bytes(10))
    files = [
        as_model_file(path),
        as_model_file(second, 10_240),
    ]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    second.chmod(0)
    real = os.open

    def as_a_user(name: Path, flags: int) -> int:
        if not name.stat().st_mode & 0o444:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return real(name, flags)

    monkeypatch.setattr(os, "open", as_a_user)
    with pytest.raises(
        SourceError, match=r"second cannot be opened: Permission denied \(errno 13\); restore the file"
    ):
        FileSource(files)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    second.chmod(0o600)
    with pytest.raises(SourceError, match=r"it since \(ctime\).*read the table again"):
        FileSource(files)
    source = FileSource([files[0], as_model_file(second, 10_240)])
    assert read(source, 10_240, 10) == bytes(10)
    source.close()


def test_counting_and_injected_faults() -> None:
    plan = FaultPlan({"read": 2})
    source = CountedSource(FaultySource(BytesSource(bytes(range(100))), plan))
    buffer = bytearray(10)
    source.read_into(Span(20, 10), memoryview(buffer))
    assert buffer == bytes(range(20, 30))
    with pytest.raises(SourceError, match="call 2 of read"):
        source.read_into(Span(0, 10), memoryview(buffer))
    assert buffer == bytes([0, 1, 2, 3, 4, 25, 26, 27, 28, 29]), "half came"
    plan.arm("verify", 1)
    with pytest.raises(SourceError, match="call 2 of verify"):
        source.read_into(Span(50, 10), memoryview(buffer))
    assert buffer == bytes(range(50, 60)), "all came"
    stats = source.stats()
    assert (stats.reads, stats.bytes_read, stats.failures) == (1, 10, 2)


def test_hints_pass_through_to_a_source_that_takes_them() -> None:
    hints: list[Span] = []

    class Hinted(BytesSource):
        def will_need(self, spans: Sequence[Span]) -> None:
            hints.extend(spans)

    spans = [Span(3, 4), Span(10, 2)]
    CountedSource(FaultySource(Hinted(b""), FaultPlan())).will_need(spans)
    assert hints == spans
    CountedSource(FaultySource(BytesSource(b""), FaultPlan())).will_need(spans)


def test_a_buffer_of_another_size(path: Path) -> None:
    with pytest.raises(ValueError, match="asked for 5 bytes into a buffer of 6: they must be equal"):
        open_source(path).read_into(Span(0, 5), memoryview(bytearray(6)))
