"""Every mode gives the same bytes; a source may be closed while threads read; the tiers read as they are told."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import expertier as et
from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.tiers import assemble as assemble_module
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.model_file import ModelFile
from limits.at_once import run_at_once
from limits.waits import Running
from model_files.file_reads import DATA, SIZE, is_open, open_source, read
from model_files.gguf_files import Block, write_model


@pytest.mark.parametrize("mode", FileMode)
def test_every_mode_gives_the_same_bytes(path: Path, mode: FileMode) -> None:
    source = open_source(path, mode)
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


@pytest.mark.parametrize("mode", [FileMode.PAGE_CACHE, FileMode.DIRECT])
def test_closing_while_a_read_runs(path: Path, mode: FileMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read ends with the right bytes from its own descriptor, and only then are the files closed."""
    source = open_source(path, mode)
    reading, closed = threading.Event(), threading.Event()
    real = os.preadv

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert closed.wait(30)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    running = Running(read, source, 50, 5000)
    assert reading.wait(30)
    source.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]  # would get the numbers that closing frees
    with pytest.raises(SourceError, match="the source was closed; open the tiers again"):
        read(source, 0, 1)
    closed.set()
    assert running.outcome() == DATA[50:5050]
    for descriptor in others:
        os.close(descriptor)
    assert not is_open(path)


@pytest.mark.parametrize("mode", FileMode)
def test_many_threads_and_a_close(path: Path, mode: FileMode) -> None:
    source = open_source(path, mode, room=lambda: 0)
    refusals: list[str] = []
    counter = itertools.count()
    lock = threading.Lock()
    n_reads = 0

    def work(seed: int) -> None:
        nonlocal n_reads
        rng = random.Random(seed)
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

    run_at_once([partial(work, seed) for seed in range(6)])
    assert len(refusals) == 6
    assert all("the source was closed" in refusal for refusal in refusals)
    assert sum(of_mode.reads for of_mode in source.stats().by_mode.values()) == n_reads > 600
    assert not is_open(path)


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
