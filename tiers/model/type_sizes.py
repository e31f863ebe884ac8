"""The size of a block of each ggml type, from which the bytes of a tensor follow.

The gguf package has a list of sizes, and each engine has one that may be newer. A caller that has an engine passes the
engine's list.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple, Protocol

from gguf import GGML_QUANT_SIZES


class BlockSize(NamedTuple):
    """The size of one block of a type: how many `elements` it holds, and in how many bytes."""

    elements: int
    n_bytes: int


class TypeSizes(Protocol):
    """A list of the block sizes of ggml types."""

    def block(self, ggml_type: int) -> BlockSize | None:
        """Return the size of a block of a type; None for an unknown type."""

    @property
    def advice(self) -> str:
        """Whose list lacks a type, and what to do then, as the end of the sentence "type 42 is none that "."""


class PackageTypes:
    """The types of the installed gguf package."""

    def block(self, ggml_type: int) -> BlockSize | None:
        """Return the size of a block of a type; None for an unknown type."""
        return _PACKAGE.get(ggml_type)

    @property
    def advice(self) -> str:
        """Whose list lacks a type, and what to do then."""
        return (
            f"the installed gguf package ({version('gguf')}) knows. An engine may know it: `expertier run`, `serve` "
            "and `exec` ask theirs, and so does ExpertTable.from_gguf(path, EngineTypes(open_engine)) in Python; "
            "`inspect` and `plan`, which have none, need a newer gguf package (pip install --upgrade gguf)"
        )


_PACKAGE = {int(kind): BlockSize(*size) for kind, size in GGML_QUANT_SIZES.items()}
PACKAGE_TYPES = PackageTypes()
"""The list for callers that have no engine."""
