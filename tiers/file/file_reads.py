"""What a file source counts."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.tiers.config.file_mode import FileMode


@dataclass(frozen=True, slots=True)
class FileReads:
    """Completed reads by mode, and what reading directly takes. Counters only grow; `mode` is as of now.

    `mode` is never `auto`. `trial_reads` were done in the other mode to measure it, and count in that mode.
    `scratch_bytes` is the aligned memory that direct reads hold; they give it back when the source is closed.
    """

    mode: FileMode
    mode_changes: int
    page_cache_reads: int
    page_cache_bytes: int
    direct_reads: int
    direct_bytes: int
    trial_reads: int
    scratch_bytes: int
