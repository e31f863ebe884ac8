"""How large a block of each ggml type is: the bytes of a tensor follow from it.

The gguf package has a list, and so has each engine; an engine's may be newer. Whoever has one at hand passes it in.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple, Protocol

from gguf import GGML_QUANT_SIZES


class BlockSize(NamedTuple):
    """One block of a type: the `elements` that it holds, in `n_bytes`."""

    elements: int
    n_bytes: int


class TypeSizes(Protocol):
    """Knows the block sizes of ggml types."""

    def block(self, ggml_type: int) -> BlockSize | None:
        """Return the block of a type; None for one that is not known."""

    @property
    def advice(self) -> str:
        """Who does not know a type, and what to do then, as the end of a sentence "type 42 is none that "."""


class PackageTypes:
    """The types of the installed gguf package."""

    def block(self, ggml_type: int) -> BlockSize | None:
        """Return the block of a type; None for one that is not known."""
        return _PACKAGE.get(ggml_type)

    @property
    def advice(self) -> str:
        """Who does not know a type, and what to do then."""
        return (
            f"the installed gguf package ({version('gguf')}) knows. An engine may know it: `expertier run`, `serve` "
            "and `exec` ask theirs, and so does ExpertTable.from_gguf(path, EngineTypes(open_engine)) in Python; "
            "`inspect` and `plan`, which have none, need a newer gguf package (pip install --upgrade gguf)"
        )


_PACKAGE = {int(kind): BlockSize(*size) for kind, size in GGML_QUANT_SIZES.items()}
PACKAGE_TYPES = PackageTypes()
"""For everyone who has no engine at hand."""
