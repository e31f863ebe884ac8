"""Expert bytes from the model's files."""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from expertier.errors import SourceError
from expertier.interrupts import completing, deferring, opening
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.file_reads import FileReads
from expertier.tiers.file.in_flight_reads import InFlightReads
from expertier.tiers.file.mode_chooser import Choice, ModeChooser, Purpose
from expertier.tiers.file.open_file import OpenFile
from expertier.tiers.file.scratch import ScratchPool
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.span import Span
from expertier.tiers.shared.host_memory import available_bytes
from expertier.units import MIB

_SCRATCH_BYTES = 4 * MIB  # most expert matrices in one piece; what is not used is never touched
_UNCACHED = 2  # a first read that takes longer than this many second ones came from the disk
_PAGE_CACHE, _DIRECT, _PLAIN = (
    FileMode.PAGE_CACHE,
    FileMode.DIRECT,
    Purpose.PLAIN,
)  # looking them up takes time

_log = logging.getLogger(__name__)


class FileSource:
    """The model's files, opened read-only; a `ByteSource`. Thread-safe: reads carry their offset.

    A file that is not, or no longer, the one whose header was read is refused: after every read, before its
    bytes are believed. A file that loses its name or is replaced by renaming stays open here, and is the same.
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
        """Open `files`; `SourceError` when that fails or one is not the file that its identity describes.

        `auto` compares the bytes that will be read again and again (`working_set_bytes`; all of the files,
        unless it is given) with the RAM left over (`room`), and measures with `clock`, in seconds.
        """
        self._begins = [file.begin for file in files]
        self._files: list[OpenFile] = []
        self._scratch: ScratchPool | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._trial_reads = 0
        self._in_flight = InFlightReads(self._close_files)
        self._mode = mode
        self._chooser: ModeChooser | None = None
        for file in files:
            self._files.append(OpenFile(file))
        if mode is not FileMode.PAGE_CACHE:
            self._open_direct()
        if self._mode is FileMode.AUTO:
            n_bytes = sum(file.identity.n_bytes for file in files)
            self._chooser = ModeChooser(n_bytes if working_set_bytes is None else working_set_bytes, room)

    @property
    def mode(self) -> FileMode:
        """How reads are done now; never `auto`."""
        chooser = self._chooser
        return chooser.mode if chooser is not None else self._mode

    @deferring
    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the model's bytes of `span`, all of which lie in one file.

        Raises `SourceError` with the path, offset, bytes and cause when not all of them could be read or the
        file has changed; the buffer's bytes are then undefined.
        """
        if len(buffer) != span.n_bytes:
            raise ValueError(
                f"asked for {span.n_bytes} bytes into a buffer of {len(buffer)}: they must be equal"
            )
        number = self._number(span.offset)
        begin = self._begins[number]
        if not self._in_flight.begin():
            raise SourceError(
                f"asked for {span.n_bytes} bytes at offset {span.offset} of the model, but the source was closed; "
                "open the tiers again"
            )
        done: FileMode | None = None
        try:
            file, offset = self._files[number], span.offset - begin
            chooser = self._chooser
            if chooser is None:
                done = self._read(file, offset, buffer, self._mode)
            else:
                done = self._read_by_choice(file, offset, buffer, chooser)
        finally:
            self._in_flight.end(done, span.n_bytes)

    @deferring
    def will_need(self, spans: Iterable[Span]) -> None:
        """Say which spans are read next, so that the disk works on all of them at once.

        A hint: nothing is raised. It does nothing for direct reads, nor once the source is closed.
        """
        if self.mode is FileMode.DIRECT or not self._in_flight.begin():
            return
        try:
            for span in spans:
                number = self._number(span.offset)
                self._files[number].will_need(span.offset - self._begins[number], span.n_bytes)
        except OSError:
            pass  # the read that follows has the same trouble and says it
        finally:
            self._in_flight.end(None, 0)

    def stats(self) -> FileReads:
        """Return what was read how, so far."""
        reads, chooser, scratch = self._in_flight, self._chooser, self._scratch
        return FileReads(
            mode=self.mode,
            mode_changes=chooser.n_changes if chooser is not None else 0,
            page_cache_reads=reads.page_cache_reads,
            page_cache_bytes=reads.page_cache_bytes,
            direct_reads=reads.direct_reads,
            direct_bytes=reads.direct_bytes,
            trial_reads=self._trial_reads,
            scratch_bytes=scratch.n_bytes if scratch is not None else 0,
        )

    @completing
    def close(self) -> None:
        """Let no more reads begin and close the files, at the latest when the last running read ends.

        Never waits; a second call does nothing.
        """
        self._in_flight.close()

    # ---- inside

    def _free(self) -> None:
        """Close what is open, where opening has failed."""
        self.close()

    def _number(self, offset: int) -> int:
        return max(bisect.bisect_right(self._begins, offset) - 1, 0)

    def _open_direct(self) -> None:
        for file in self._files:
            refusal = file.open_direct()
            if refusal is not None:
                self._give_up_direct(file, refusal)
                return
        alignments = [file.alignment for file in self._files if file.alignment is not None]
        memory = max(alignment.memory for alignment in alignments)
        block = max(memory, *(alignment.offset for alignment in alignments))
        self._scratch = ScratchPool(max(_SCRATCH_BYTES, 2 * block), memory)

    def _give_up_direct(self, file: OpenFile, why: str) -> None:
        """Read through the page cache from now on; said once."""
        with self._lock:
            if self._mode is FileMode.PAGE_CACHE:
                return
            log = _log.warning if self._mode is FileMode.DIRECT else _log.info
            self._mode, self._chooser = FileMode.PAGE_CACHE, None
            for each in self._files:
                each.give_up_direct()
        log("%s cannot be read directly (%s): reading through the page cache", file.file.path, why)

    def _read(self, file: OpenFile, offset: int, buffer: memoryview, mode: FileMode) -> FileMode:
        """Read in `mode`, or through the page cache where direct reads turn out not to work."""
        scratch = self._scratch
        if mode is _DIRECT and scratch is not None:
            if file.read_direct(offset, buffer, scratch):
                return _DIRECT
            self._give_up_direct(file, "the file system refuses such reads")
        file.read(offset, buffer)
        return _PAGE_CACHE

    def _read_by_choice(
        self, file: OpenFile, offset: int, buffer: memoryview, chooser: ModeChooser
    ) -> FileMode:
        choice = chooser.choose()
        if choice.purpose is _PLAIN:
            return self._read(file, offset, buffer, choice.mode)
        begin = self._clock()
        done = self._read(file, offset, buffer, choice.mode)
        seconds = self._clock() - begin
        if done is choice.mode:
            self._record(file, offset, buffer, choice, seconds, chooser)
        return done

    def _record(
        self,
        file: OpenFile,
        offset: int,
        buffer: memoryview,
        choice: Choice,
        seconds: float,
        chooser: ModeChooser,
    ) -> None:
        again_s = None
        if choice.purpose is Purpose.TRIAL:
            with self._lock:
                self._trial_reads += 1
            if choice.mode is FileMode.PAGE_CACHE:
                begin = self._clock()
                file.read(offset, buffer)
                again_s = self._clock() - begin
                if seconds > _UNCACHED * again_s:
                    file.forget(offset, len(buffer))
        change = chooser.record(choice, len(buffer), seconds, again_s)
        if change is not None:
            _log.info("%s is read %s", self._files[0].file.path.name, change)

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        if self._scratch is not None:
            self._scratch.close()
