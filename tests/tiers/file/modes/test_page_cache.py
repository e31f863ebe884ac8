"""Hints to the kernel, which reads ahead into its page cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file import open_file as open_file_module
from expertier.tiers.model.span import Span
from model_files.file_reads import DATA, open_source, read


def test_hints_change_nothing_but_speed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path, FileMode.PAGE_CACHE)
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
    assert asked == [(5, 10)], "the cache has the second span already"

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fadvise", fail)
    source.will_need([Span(5, 10)])
    assert read(source, 5, 10) == DATA[5:15]
    source.close()
    source.will_need([Span(5, 10)])
    directly = open_source(path, FileMode.DIRECT)
    directly.will_need([Span(5, 10)])
    directly.close()
