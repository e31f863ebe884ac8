"""The counts that a file source keeps of its reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from expertier.tiers.config.file_mode import FileMode


class ModeReads(NamedTuple):
    """How many reads were completed in one mode, and how many bytes they read."""

    reads: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class FileReads:
    """The completed reads of a file source, and the memory that reading takes.

    `mode` is the mode of reads at this moment, never `auto`; `mode_changes` says how often it has changed. `by_mode`
    has every mode in which something was read. `trial_reads` are reads that `auto` did in the mode that it does not use
    now, in order to measure that mode; `by_mode` counts them under it. `scratch_bytes` is the memory that the modes
    hold until the source is closed. All other numbers are counters, which only grow.
    """

    mode: FileMode
    mode_changes: int
    by_mode: Mapping[FileMode, ModeReads]
    trial_reads: int
    scratch_bytes: int
