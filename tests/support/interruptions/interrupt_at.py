"""Interrupts that become pending at the n-th instruction of a call, for every n."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from expertier.added_flags import C_VARIABLE, added_flags
from expertier.engine_adapter.build.compiler import find_compiler

_SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What came of one call that was interrupted before its `nth` instruction, which is in `place`.

    `place` is empty where the call had fewer instructions and so no interrupt. `error` is what the call raised, or what
    was raised right after it; `result` what it returned, where it did.
    """

    nth: int
    place: str
    error: BaseException | None
    result: Any
    returned: bool


@cache
def _library() -> Any:
    """Compile and load the tracer; PyDLL, as its functions are part of the interpreter's work."""
    folder = Path(tempfile.mkdtemp(prefix="interrupt-at-"))
    made = folder / "interrupt_at.so"
    command = [*find_compiler().command, "-x", "c", "-O2", "-fPIC", "-shared"]
    command += [*added_flags(C_VARIABLE), str(_SOURCE), "-o", str(made)]
    try:
        subprocess.run(command, check=True, timeout=300)
        library: Any = ctypes.PyDLL(str(made))
    finally:
        made.unlink(missing_ok=True)
        folder.rmdir()
    library.interrupt_at.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    library.interrupt_at.restype = None
    library.interrupt_end.restype = ctypes.c_int64
    library.interrupt_place.restype = ctypes.c_char_p
    return library


def expertier_folders() -> list[str]:
    """Return where the package's source files are, as code objects name them."""
    import expertier.engine_adapter
    import expertier.hip
    import expertier.planner
    import expertier.tiers

    packages = (expertier, expertier.tiers, expertier.planner, expertier.hip, expertier.engine_adapter)
    return [str(Path(package.__file__ or "").parent) + "/" for package in packages]


def standard_library() -> list[str]:
    """Return where Python's own modules are."""
    return [sysconfig.get_path("stdlib") + "/"]


def interrupted_at(nth: int, call: Callable[[], Any], folders: Sequence[str]) -> Interrupted:
    """Call `call` with SIGINT pending before its `nth` instruction in files of `folders`; 0: with none.

    The handler is the caller's business. An interrupt that the call has not raised by its end is raised right after, as
    Python looks for signals at the next call. The garbage collector is off meanwhile: it may run callbacks of whatever
    earlier tests have left, and CPython swallows what is raised in those.
    """
    library = _library()
    watched = "".join(f"{folder}\n" for folder in folders).encode()
    results: list[Any] = []
    error: BaseException | None = None
    collects = gc.isenabled()
    gc.disable()
    # No instruction between these, save those of `call`, looks for signals without being within the `try`.
    try:
        try:
            library.interrupt_at(nth, watched)
            results += (call(),)
        finally:
            library.interrupt_end()
    except BaseException as raised:
        error = raised
    finally:
        if collects:
            gc.enable()
    return Interrupted(
        nth,
        library.interrupt_place().decode(),
        error,
        results[0] if results else None,
        bool(results),
    )


def at_every_instruction(
    call: Callable[[], Any], folders: Sequence[str], *, at: Iterable[int] | None = None
) -> Iterator[Interrupted]:
    """Yield what came of `call` interrupted at its first instruction, its second, and so on up to its last.

    Or at those in `at`. The call that has fewer instructions ends it, and is not yielded; it has to succeed.
    """
    for nth in at if at is not None else _from_one():
        found = interrupted_at(nth, call, folders)
        if not found.place:
            if found.error is not None:
                raise found.error
            return
        yield found


def n_instructions(call: Callable[[], Any], folders: Sequence[str]) -> int:
    """Return how many instructions `call` has in files of `folders`."""
    library = _library()
    watched = "".join(f"{folder}\n" for folder in folders).encode()
    library.interrupt_at(0, watched)
    try:
        call()
    finally:
        n = int(library.interrupt_end())
    return n


def _from_one() -> Iterator[int]:
    nth = 0
    while True:
        nth += 1
        yield nth
