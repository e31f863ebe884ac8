"""What a file source counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from expertier.tiers.config.file_mode import FileMode


class ModeReads(NamedTuple):
    """Completed reads of one mode, and their bytes."""

    reads: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class FileReads:
    """Completed reads, and what reading takes. Counters only grow; `mode` is as of now, and never `auto`.

    `by_mode` has the modes in which something was read. `trial_reads` were done in the other mode to measure it, and
    count in that mode. `scratch_bytes` is the memory that the modes hold; it is given back when the source is closed.
    """

    mode: FileMode
    mode_changes: int
    by_mode: Mapping[FileMode, ModeReads]
    trial_reads: int
    scratch_bytes: int
