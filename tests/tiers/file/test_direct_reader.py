"""Direct reads against a file system that insists on its alignment, and gives less than it is asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertier.tiers.file import dio_alignment as alignment_module
from expertier.tiers.file.dio_alignment import DioAlignment, dio_alignment
from expertier.tiers.file.direct_reader import DirectReader
from expertier.tiers.file.scratch import ScratchPool

SIZE = 40_007
DATA = random.Random(0).randbytes(SIZE)


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class StrictDisk:
    """Stands in for os.preadv: EINVAL for what is not aligned, whole blocks but at most `most` bytes a call."""

    def __init__(self, alignment: DioAlignment, most: int) -> None:
        self.alignment = alignment
        self.most = max(most // alignment.offset, 1) * alignment.offset
        self.calls = 0

    def preadv(self, _: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        memory, block = self.alignment
        if offset % block or any(len(part) % block or address_of(part) % memory for part in buffers):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        left = min(self.most, max(SIZE - offset, 0))
        done = 0
        for part in buffers:
            n = min(len(part), left - done)
            part[:n] = DATA[offset + done : offset + done + n]
            done += n
        return done


def read_all(reader: DirectReader, offset: int, buffer: memoryview, scratch: memoryview) -> int:
    done = 0
    while done < len(buffer):
        n = reader.read(offset + done, buffer[done:], address_of(buffer) + done, scratch)
        assert 0 <= n <= len(buffer) - done
        if n == 0:
            break
        done += n
    return done


@settings(max_examples=300)
@given(
    block=st.sampled_from([512, 4096]),
    memory=st.sampled_from([1, 4, 512, 4096]),
    most=st.sampled_from([512, 4096, 12_288, 1 << 30]),
    scratch_bytes=st.sampled_from([8192, 1 << 16]),
    offset=st.integers(0, SIZE + 10),
    n_bytes=st.integers(1, SIZE + 10),
    at=st.integers(0, 4096),
)
def test_any_bytes_into_any_memory(
    block: int, memory: int, most: int, scratch_bytes: int, offset: int, n_bytes: int, at: int
) -> None:
    alignment = DioAlignment(memory, block)
    disk = StrictDisk(alignment, most)
    whole = memoryview(mmap.mmap(-1, n_bytes + 8192))
    buffer = whole[at : at + n_bytes]
    pool = ScratchPool(scratch_bytes, memory)
    with pytest.MonkeyPatch.context() as patch, pool.block() as scratch:
        patch.setattr(os, "preadv", disk.preadv)
        done = read_all(DirectReader(0, alignment), offset, buffer, scratch)
    assert done == max(min(n_bytes, SIZE - offset), 0)
    assert buffer[:done] == DATA[offset : offset + done]
    assert not any(whole[:at]), "bytes before the buffer were written"
    assert not any(whole[at + n_bytes :]), "bytes after the buffer were written"


@pytest.mark.parametrize(("offset", "n_bytes"), [(0, 8192), (100, 20_000), (512, 20_000), (100, 8092)])
def test_where_the_memory_allows_it_one_call_reads_in_place(offset: int, n_bytes: int) -> None:
    disk = StrictDisk(DioAlignment(4, 512), 1 << 30)
    buffer = memoryview(mmap.mmap(-1, n_bytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", disk.preadv)
        scratch = memoryview(mmap.mmap(-1, 1024))  # two blocks: had it been read through them, 20 calls
        assert read_all(DirectReader(0, disk.alignment), offset, buffer, scratch) == n_bytes
    assert disk.calls == 1
    assert buffer == DATA[offset : offset + n_bytes]


def test_what_the_file_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(10_000))
    with path.open("rb") as file:
        said = dio_alignment(file.fileno())
        if said is not None:
            assert all(value > 0 and value & (value - 1) == 0 for value in said)

        def answering(mask: int, memory: int, offset: int, status: int = 0) -> DioAlignment | None:
            def statx(_fd: int, _path: bytes, _flags: int, _mask: int, result: object) -> int:
                found = ctypes.cast(result, ctypes.POINTER(alignment_module._Statx)).contents  # type: ignore[arg-type]
                found.mask, found.dio_memory, found.dio_offset = mask, memory, offset
                return status

            monkeypatch.setattr(alignment_module, "_statx", lambda: statx)
            return dio_alignment(file.fileno())

        assert answering(0x2000, 4, 512) == (4, 512)
        assert answering(0x2000, 0, 0) is None
        assert answering(0, 4, 512) == (4096, 4096)
        assert answering(0x2000, 4, 512, status=-1) == (4096, 4096)
        monkeypatch.setattr(alignment_module, "_statx", lambda: None)
        assert dio_alignment(file.fileno()) == (4096, 4096)


def test_a_libc_without_statx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    alignment_module._statx.cache_clear()
    try:
        assert alignment_module._statx() is None
    finally:
        alignment_module._statx.cache_clear()
