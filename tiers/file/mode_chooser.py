"""Chooses the faster way of reading the file, page cache or direct, from measured times.

    page-cache ── direct reads are faster by the margin, and the cache fills no further ──► direct
        ▲                                                                                     │
        └── reads through a filled cache are predicted to be faster by the margin ────────────┘

Direct reads leave the page cache empty, and reads through an empty cache are slow, so trials alone would never show how
fast a filled cache is. That speed is predicted instead. A filled cache holds a share of the working set, the free RAM
divided by the working set; this share of the reads would find its bytes there, and the rest would go to the disk.
Each trial reads its bytes twice, so it measures the speeds of both kinds of reads.

Where the page cache turned out slower than predicted, later predictions are lowered by the same factor. They stay low
until the amount of free RAM changes, or until enough was read directly; that amount doubles each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.cache_filling import CacheFilling
from expertier.tiers.file.read_rate import ReadRate
from expertier.units import mib

TIMED_EVERY = 7  # reads; a prime, so that not always the same of an expert's 2 or 3 matrices is timed
TRIAL_EVERY = 61  # reads between trials, at least; a prime for the same reason
_TRIAL_SHARE = 0.02  # trials take at most this share of all time, once both modes have been measured
_RARELY = 4096  # reads between trials, at most
_MARGIN = 1.2  # the other mode has to be faster by this factor
_LEAST_TRIALS = 4
_ROOM_CHANGE = 1.25  # free RAM has to change by this factor before lowered predictions are raised again
_PATIENCE = 16  # a cache that disappointed is tried again after this many times its bytes were read directly
_SAID = {FileMode.PAGE_CACHE: "through the page cache", FileMode.DIRECT: "directly"}


class Purpose(Enum):
    """What a read is good for beside its bytes."""

    PLAIN = auto()  # nothing
    TIMED = auto()  # its time is passed to `record`
    TRIAL = auto()  # it is done in the other mode; its time, and perhaps a second read's, go to `record`


class Choice(NamedTuple):
    """How to do one read."""

    mode: FileMode
    purpose: Purpose


class ModeChooser:
    """Chooses between page cache and direct from times that its caller measures. Thread-safe; it does no reads.

    Deterministic: the same calls and the same answers of `room` give the same choices.
    """

    def __init__(self, working_set_bytes: int, room: Callable[[], int]) -> None:
        """Begin with the page cache where free RAM (`room()`, in bytes) holds the whole working set, else directly."""
        self._working_set_bytes = max(working_set_bytes, 1)
        self._room = room
        self._lock = threading.Lock()
        self._n_reads = 0
        self._next_trial = TRIAL_EVERY
        self._page_cache = ReadRate()
        self._direct = ReadRate()
        self._cached = ReadRate()
        self._uncached = ReadRate()
        self._room_bytes = room()
        self._filling = CacheFilling(self._fill_bytes)
        self._use(FileMode.PAGE_CACHE if self._share >= 1 else FileMode.DIRECT)
        self._direct_bytes = 0  # about what was read directly since the last change of mode
        self._gave: float | None = None  # bytes/s of the page cache when it was left, until `_trust` has it
        self._trust = 1.0  # the page cache's measured speed, divided by the predicted one; at most 1
        self._trusted_at = self._room_bytes
        self._patience = _PATIENCE
        self.n_changes = 0

    @property
    def mode(self) -> FileMode:
        """The mode of all reads except trials."""
        return self._mode

    def choose(self) -> Choice:
        """Return how to do the next read."""
        with self._lock:
            self._n_reads += 1
            if self._n_reads >= self._next_trial:
                self._next_trial = self._n_reads + self._trial_distance()
                return Choice(_other(self._mode), Purpose.TRIAL)
            return self._timed if self._n_reads % TIMED_EVERY == 0 else self._plain

    def record(
        self, choice: Choice, n_bytes: int, seconds: float, again_s: float | None = None
    ) -> str | None:
        """Count the time of a read that was not plain; return why the mode changes, None where it does not.

        A trial of the page cache reads its bytes a second time at once; `again_s` is the time of the second read.
        """
        room_bytes = self._room() if choice.purpose is Purpose.TRIAL else None
        with self._lock:
            if choice.mode is FileMode.DIRECT:
                self._direct.add(n_bytes, seconds)
                self._direct_bytes += n_bytes * TIMED_EVERY
            elif choice.purpose is Purpose.TIMED:
                self._page_cache.add(n_bytes, seconds)
                self._filling.add(n_bytes, n_bytes * TIMED_EVERY, seconds)
            else:
                self._uncached.add(n_bytes, seconds)
                self._cached.add(n_bytes, seconds if again_s is None else again_s)
            if room_bytes is None:
                return None
            self._note_room(room_bytes)
            return self._judge()

    def _judge(self) -> str | None:
        direct = self._direct.bytes_per_s
        if self._mode is FileMode.PAGE_CACHE:
            found = self._page_cache.bytes_per_s
            if not (self._filling.done and self._direct.n_reads >= _LEAST_TRIALS):
                return None
            if not direct > _MARGIN * found > 0:
                return None
            self._gave = found
            return self._change(found)
        if min(self._cached.n_reads, self._uncached.n_reads, self._direct.n_reads) < _LEAST_TRIALS:
            return None
        expected = self._expected()
        if not expected > _MARGIN * direct > 0:
            return None
        return self._change(expected)

    def _trial_distance(self) -> int:
        """Return after how many reads the next trial begins, so that trials take a small share of all time.

        A trial can take long: where the page cache holds everything, a direct read takes as long as 20 cached reads.
        """
        if self._mode is FileMode.PAGE_CACHE:
            usual, trials = self._page_cache, [self._direct]
        else:
            usual, trials = self._direct, [self._uncached, self._cached]
        if min(rate.n_reads for rate in (usual, *trials)) < _LEAST_TRIALS or usual.bytes_per_s == 0:
            return TRIAL_EVERY
        extra = sum(usual.bytes_per_s / rate.bytes_per_s for rate in trials if rate.bytes_per_s > 0) - 1
        return min(max(int(extra / _TRIAL_SHARE), TRIAL_EVERY), _RARELY)

    def _expected(self) -> float:
        """Return the speed predicted for a filled page cache, in bytes a second; 0 where measurements are missing."""
        cached, uncached = self._cached.bytes_per_s, self._uncached.bytes_per_s
        if not (cached and uncached):
            return 0.0
        predicted = 1 / (self._share / cached + (1 - self._share) / uncached)
        if self._gave is not None:
            self._trust, self._gave = min(self._gave / predicted, 1.0), None
        elif self._trust < 1 and self._direct_bytes >= self._patience * self._fill_bytes:
            self._patience *= 2
            self._trust = 1.0
        return predicted * self._trust

    def _note_room(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        if not self._trusted_at / _ROOM_CHANGE <= room_bytes <= self._trusted_at * _ROOM_CHANGE:
            self._trusted_at = room_bytes
            if self._mode is FileMode.DIRECT:
                self._gave, self._trust, self._patience = None, 1.0, _PATIENCE

    @property
    def _fill_bytes(self) -> int:
        return min(self._room_bytes, self._working_set_bytes)

    @property
    def _share(self) -> float:
        return min(self._room_bytes / self._working_set_bytes, 1.0)

    def _use(self, mode: FileMode) -> None:
        self._mode = mode
        self._plain, self._timed = Choice(mode, Purpose.PLAIN), Choice(mode, Purpose.TIMED)

    def _change(self, page_cache: float) -> str:
        self._use(_other(self._mode))
        self._page_cache, self._filling = ReadRate(), CacheFilling(self._fill_bytes)
        self._cached, self._uncached = ReadRate(), ReadRate()
        self._direct_bytes = 0
        self.n_changes += 1
        direct = self._direct.bytes_per_s
        return (
            f"{_SAID[self._mode]} from now on: {mib(int(direct))}/s directly, {mib(int(page_cache))}/s through the "
            f"page cache, {mib(self._room_bytes)} of RAM left for {mib(self._working_set_bytes)} of experts"
        )


def _other(mode: FileMode) -> FileMode:
    return FileMode.DIRECT if mode is FileMode.PAGE_CACHE else FileMode.PAGE_CACHE
