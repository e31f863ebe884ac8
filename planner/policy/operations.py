"""The policy's operations: one table, from which all entry points are made.

An operation is a function of `policy.py` or `queries.py` (each policy has a `begin` of its own). Its arguments are a
layer's view, arrays of n int32 with n behind the first array, and single int32:

    evicted_by(view, slots, n, experts) -> int          Operation("evicted_by", reads=("slots",), writes=("experts",))
    int32 evicted_by(const int64 *directory, int32 layer, const int32 *slots, int32 n, int32 *experts)

From the table `calls/native.py` makes the C functions, `calls/interpreted.py` makes the calls of the operations that a
directory holds, and `engine_adapter/abi/structs.py` makes the struct of the operations that an engine gets. A test
compares the struct in C with the table. So a new operation is its function and its row, and for an engine a line in
`abi.h`. Importing this file loads no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

_FIRST_ENTRY = 3
"""Where the addresses of functions begin in a directory's head, after STAMP, N_LAYERS and KIND."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table. Each operation returns an int32: a count, a slot, 0, or an `Outcome`."""

    name: str
    reads: tuple[str, ...] = ()
    """Arrays of n int32 that stay as they are. They come before those of `writes`."""
    writes: tuple[str, ...] = ()
    """Arrays of n int32 that the operation writes to."""
    numbers: tuple[str, ...] = ()
    """Single int32 arguments; no operation has both arrays and numbers."""
    in_directory: bool = False
    """Whether directories hold its address, so that compiled Python code can call it."""
    module: str = "policy"
    """The file of `planner/policy` with the function: `queries` for an operation that changes nothing in the tables."""
    for_engine: bool = True
    """Whether it is in the struct of addresses that an engine gets (`expertier_policy`)."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of arrays and of single numbers, which determine the signature."""
        return len(self.reads) + len(self.writes), len(self.numbers)

    def function(self) -> Callable[..., int]:
        """Import the operation's function, and with it the compiler; `begin` has none here."""
        found: Callable[..., int] = getattr(import_module(f"{__package__}.{self.module}"), self.name)
        return found

    def c_declaration(self) -> str:
        """Return the operation as a field of `expertier_policy`: a pointer to its C function."""
        arrays = [f"const int32_t * {name}" for name in self.reads] + [
            f"int32_t * {name}" for name in self.writes
        ]
        counted = [*arrays[:1], *(["int32_t n"] if arrays else []), *arrays[1:]]
        numbers = [f"int32_t {name}" for name in self.numbers]
        parameters = ["const int64_t * directory", "int32_t layer", *counted, *numbers]
        return f"int32_t (*{self.name})({', '.join(parameters)});"


OPERATIONS = (
    Operation("begin", reads=("experts",), writes=("slots", "miss_index"), in_directory=True),
    Operation("complete", reads=("slots",), in_directory=True),
    Operation("abort", reads=("slots",), in_directory=True),
    Operation("release", reads=("slots",), in_directory=True),
    Operation("resident_first", writes=("experts",), in_directory=True, module="queries"),
    Operation("begin_prefetch", numbers=("expert",), in_directory=True, for_engine=False),
    Operation("pin_ready", reads=("experts",), writes=("slots",)),
    Operation("is_fully_resident", module="queries"),
    Operation("version", module="queries"),
    Operation("evicted_by", reads=("slots",), writes=("experts",), module="queries"),
    Operation("begin_prefetch_into", numbers=("expert", "slot")),
    Operation("victims", writes=("slots", "experts"), module="queries"),
)
"""The order is that of a directory's entries and of the fields of `expertier_policy`."""

IN_DIRECTORY = tuple(operation for operation in OPERATIONS if operation.in_directory)
END_OF_ENTRIES = _FIRST_ENTRY + len(IN_DIRECTORY)
"""The length of a directory's head."""


def entry_of(name: str) -> int:
    """Return the place of an operation's address in a directory's head; the operation is one that it holds."""
    return _FIRST_ENTRY + [operation.name for operation in IN_DIRECTORY].index(name)
