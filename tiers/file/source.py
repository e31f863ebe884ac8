"""Reads expert bytes from the model's files."""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from expertier.errors import SourceError
from expertier.interrupts import completing, deferring, opening
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.file_reads import FileReads, ModeReads
from expertier.tiers.file.in_flight_reads import InFlightReads
from expertier.tiers.file.open_file import OpenFile
from expertier.tiers.file.reader import FileReader, ReadingTerms, RefusedError
from expertier.tiers.file.readers import Readers
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.span import Span
from expertier.tiers.shared.host_memory import available_bytes

_log = logging.getLogger(__name__)


class FileSource:
    """The model's files, opened read-only; a `ByteSource`. Thread-safe.

    Every read ends with a check that the file is still the one whose header was read, and fails where it is not. A file
    that is renamed, deleted or replaced by another of its name stays open here and counts as unchanged.
    """

    @opening
    def __init__(
        self,
        files: Sequence[ModelFile],
        mode: FileMode = FileMode.AUTO,
        *,
        working_set_bytes: int | None = None,
        room: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open `files`. Raises `SourceError` where that fails or a file does not match its identity.

        The other arguments are for `auto`: the bytes that will be read again and again (`working_set_bytes`; by default
        those of all files), a function that returns the bytes of free RAM (`room`), and a clock in seconds.
        """
        if working_set_bytes is None:
            working_set_bytes = sum(file.identity.n_bytes for file in files)
        self._begins = [file.begin for file in files]
        self._files: list[OpenFile] = []
        self._readers = Readers(self._files, ReadingTerms(working_set_bytes, room, clock))
        self._lock = threading.Lock()
        self._in_flight = InFlightReads(self._close_files)
        self._asked = mode
        for file in files:
            self._files.append(OpenFile(file))
        self._page_cache = self._reader = self._readers.open(FileMode.PAGE_CACHE)
        try:
            self._reader = self._readers.open(mode)
        except RefusedError as refusal:
            self._say(refusal)

    @property
    def mode(self) -> FileMode:
        """The mode of reads at this moment; never `auto`."""
        return self._reader.mode

    @deferring
    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the model's bytes of `span`, all of which lie in one file.

        Raises `SourceError`, which names path, offset, bytes and cause, where not all bytes could be read, the file has
        changed or the source was closed. The buffer's bytes are then undefined.
        """
        if len(buffer) != span.n_bytes:
            raise ValueError(
                f"asked for {span.n_bytes} bytes into a buffer of {len(buffer)}: they must be equal"
            )
        number = self._number(span.offset)
        reader, offset = self._reader, span.offset - self._begins[number]
        if not self._in_flight.begin():
            raise SourceError(
                f"asked for {span.n_bytes} bytes at offset {span.offset} of the model, but the source was closed; "
                "open the tiers again"
            )
        done: FileReader | None = None
        try:
            done = reader.read(number, offset, buffer)
        except RefusedError as refusal:
            self._give_up(reader, refusal)
            done = self._page_cache.read(number, offset, buffer)
        finally:
            self._in_flight.end(done, span.n_bytes)

    @deferring
    def will_need(self, spans: Iterable[Span]) -> None:
        """Tell the kernel which spans are read next, so that the disk works on all of them at once.

        This is only a hint, so it raises nothing. It does nothing in modes that take no hints and after `close`.
        """
        if not self._reader.takes_hints or not self._in_flight.begin():
            return
        try:
            for span in spans:
                number = self._number(span.offset)
                self._files[number].will_need(span.offset - self._begins[number], span.n_bytes)
        except OSError:
            pass  # the read that follows meets the same error and raises it
        finally:
            self._in_flight.end(None, 0)

    def stats(self) -> FileReads:
        """Return the counts of reads so far, by mode."""
        readers = list(self._readers)
        return FileReads(
            mode=self.mode,
            mode_changes=sum(reader.mode_changes for reader in readers),
            by_mode={
                reader.mode: ModeReads(reader.n_reads, reader.bytes_read)
                for reader in readers
                if reader.n_reads > 0
            },
            trial_reads=sum(reader.trial_reads for reader in readers),
            scratch_bytes=sum(reader.held_bytes for reader in readers),
        )

    @completing
    def close(self) -> None:
        """Let no more reads begin, and close the files as soon as no read runs.

        It does not wait: where reads run, the last of them closes the files. A second call does nothing.
        """
        self._in_flight.close()

    # ---- inside

    def _free(self) -> None:
        """Close what is open already, after the constructor has failed."""
        self.close()

    def _number(self, offset: int) -> int:
        return max(bisect.bisect_right(self._begins, offset) - 1, 0)

    def _give_up(self, reader: FileReader, refusal: RefusedError) -> None:
        """Read through the page cache from now on, and log that once: only where `reader` is still in use."""
        with self._lock:
            if self._reader is not reader:
                return
            self._reader = self._page_cache
        self._say(refusal)

    def _say(self, refusal: RefusedError) -> None:
        log = _log.info if self._asked is FileMode.AUTO else _log.warning
        log("%s: reading through the page cache", refusal)

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._readers.close()
