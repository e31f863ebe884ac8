"""What must hold for every file that a stranger gives us, whatever is in it.

Reading it ends soon, allocates no more than its size and a little, and gives a table or one of our errors. Spans of a
table that was accepted lie inside the file and do not overlap, and all that is derived from a table can be.
"""

from __future__ import annotations

import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from expertier.engine_adapter.llama_cpp import skeleton
from expertier.engine_adapter.llama_cpp.loader_view import EXPERTS, HEADER, LoaderView, loader_view
from expertier.errors import ModelError
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB

ROOM_BYTES = 1 * MIB
"""What reading may allocate besides the file's size."""

CPU_SECONDS = 5.0
"""What reading a small file may take; some milliseconds are usual."""

HANG_SECONDS = 60


class RuleBrokenError(Exception):
    """A rule does not hold."""


@contextmanager
def bounded(n_bytes: int) -> Iterator[None]:
    """Raise `RuleBrokenError` where the body hangs, takes long or allocates more than `n_bytes` and some room."""

    def hang(_signal: int, _frame: FrameType | None) -> None:
        raise RuleBrokenError(f"no end after {HANG_SECONDS} s")

    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    base = tracemalloc.get_traced_memory()[0]
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_SECONDS)
    begin = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        taken = tracemalloc.get_traced_memory()[1] - base
        if not was_tracing:
            tracemalloc.stop()
    seconds = time.process_time() - begin
    if seconds > CPU_SECONDS:
        raise RuleBrokenError(f"it took {seconds:.1f} s of CPU")
    if taken > n_bytes + ROOM_BYTES:
        raise RuleBrokenError(f"it allocated {taken} bytes for {n_bytes} bytes of files")


def read_by_the_rules(path: Path, n_bytes: int) -> ExpertTable | ModelError:
    """Read the model at `path`, whose files have `n_bytes`; return its table or the error that refuses it."""
    with bounded(n_bytes):
        try:
            table = ExpertTable.from_gguf(path)
        except ModelError as error:
            require(str(path.parent) in str(error) or "convert" in str(error), f"no path in {error}")
            return error
    check_table(table)
    with bounded(n_bytes):
        try:
            view = loader_view(table)
        except ModelError as error:
            return error
    check_view(table, view)
    return table


def check_table(table: ExpertTable) -> None:
    """Check that the spans lie inside the files, apart from each other, and are those of the ranges."""
    end = 0
    for begin, stop in table.expert_ranges:
        require(end <= begin < stop, f"the range {begin} to {stop} begins before {end}")
        end = stop
        files = [file for file in table.files if file.begin <= begin and stop <= file.end]
        require(len(files) == 1, f"the range {begin} to {stop} lies in {len(files)} files")
    require(end <= table.file_bytes, f"the ranges end at {end}, the files at {table.file_bytes}")
    ranges = sum(stop - begin for begin, stop in table.expert_ranges)
    require(
        ranges == table.expert_bytes_total, f"{ranges} bytes in ranges, {table.expert_bytes_total} of experts"
    )
    for number, layer in enumerate(table.layers):
        last = table.span(number, layer.n_experts - 1)
        for (begin, n_bytes), matrix in zip(last, layer.matrices, strict=True):
            stop = matrix.file_offset + layer.n_experts * matrix.expert_bytes
            require(
                n_bytes > 0 and begin + n_bytes == stop, f"the last expert of {matrix.name} ends elsewhere"
            )
    require(len({layer.block for layer in table.layers}) == table.n_layers, "two layers are the same block")
    for demand in table.layer_demands():
        require(1 <= demand.top_k <= demand.n_experts and demand.slot_bytes > 0, f"demands {demand}")


def check_view(table: ExpertTable, view: LoaderView) -> None:
    """Check that the extents are contiguous, inside their files, and show the loader no expert byte."""
    at = 0
    experts = table.expert_ranges
    for extent in view.extents:
        require(extent.begin == at and extent.end > at, f"{extent} does not begin at {at}")
        at = extent.end
        if extent.file == HEADER:
            n_header = len(view.header or b"")
            require(
                extent.offset + extent.end - extent.begin <= n_header, f"{extent} is longer than the header"
            )
        elif extent.file != EXPERTS:
            file = table.files[extent.file]
            begin = file.begin + extent.offset
            end = begin + extent.end - extent.begin
            require(file.begin <= begin and end <= file.end, f"{extent} is outside of its file")
            require(
                not any(begin < stop and start < end for start, stop in experts), f"{extent} shows experts"
            )


def check_skeleton(table: ExpertTable, folder: Path) -> None:
    """Check that copies without experts, made in `folder`, are the files with zeros for the experts."""
    for file in table.files:
        expected = bytearray(file.path.read_bytes())
        for begin, end in table.expert_ranges:
            if file.begin <= begin < file.end:
                expected[begin - file.begin : end - file.begin] = bytes(end - begin)
        copy = folder / file.path.name
        with bounded(len(expected)):
            skeleton._copy_without_experts(table, file, copy)
        require(copy.read_bytes() == bytes(expected), f"the skeleton of {file.path} has other bytes")
        copy.unlink()


def require(holds: bool, message: str) -> None:
    """Raise `RuleBrokenError` where it does not hold; unlike `assert` also under -O."""
    if not holds:
        raise RuleBrokenError(message)
