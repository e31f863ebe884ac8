"""Reads through the page cache or directly, whichever is faster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.mode_chooser import Choice, ModeChooser, Purpose
from expertier.tiers.file.open_file import OpenFile
from expertier.tiers.file.reader import FileReader, ReadingTerms
from expertier.tiers.file.readers import Readers

_UNCACHED = 2  # a read came from the disk where it took longer than this many second reads of the same bytes
_DIRECT, _PLAIN = FileMode.DIRECT, Purpose.PLAIN  # looking up an enum's member takes time

_log = logging.getLogger(__name__)


class Reader(FileReader):
    """Reads in the mode that `ModeChooser` chooses, and measures the reads that it asks to have measured."""

    def __init__(self, files: Sequence[OpenFile], terms: ReadingTerms, readers: Readers) -> None:
        """Open the readers of both modes."""
        self._files = files
        self._page_cache = readers.open(FileMode.PAGE_CACHE)
        self._direct = readers.open(FileMode.DIRECT)
        self._chooser = ModeChooser(terms.working_set_bytes, terms.room)
        self._clock = terms.clock
        self._lock = threading.Lock()

    @property
    def mode(self) -> FileMode:
        """The mode of all reads except trials."""
        return self._chooser.mode

    @property
    def takes_hints(self) -> bool:
        """True while reads go through the page cache."""
        return self._chooser.mode is not _DIRECT

    def read(self, number: int, offset: int, buffer: memoryview) -> FileReader:
        """Fill `buffer`, and measure the time where the chooser asks for it."""
        choice = self._chooser.choose()
        reader = self._direct if choice.mode is _DIRECT else self._page_cache
        if choice.purpose is _PLAIN:
            return reader.read(number, offset, buffer)
        begin = self._clock()
        reader.read(number, offset, buffer)
        self._record(self._files[number], offset, buffer, choice, self._clock() - begin)
        return reader

    def _record(
        self, file: OpenFile, offset: int, buffer: memoryview, choice: Choice, seconds: float
    ) -> None:
        again_s = None
        if choice.purpose is Purpose.TRIAL:
            with self._lock:
                self.trial_reads += 1
            if choice.mode is FileMode.PAGE_CACHE:
                begin = self._clock()
                file.read(offset, buffer)
                again_s = self._clock() - begin
                if seconds > _UNCACHED * again_s:
                    file.forget(offset, len(buffer))
        change = self._chooser.record(choice, len(buffer), seconds, again_s)
        if change is not None:
            with self._lock:
                self.mode_changes += 1
            _log.info("%s is read %s", self._files[0].file.path.name, change)
