"""Block sizes of ggml types: from the gguf package, and from the engine for types that the package does not know."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Protocol

from expertier.tiers.model.type_sizes import PACKAGE_TYPES, BlockSize


class SizedEngine(Protocol):
    """The part of an engine that is used here."""

    @property
    def library_paths(self) -> tuple[Path, ...]:
        """The engine's libraries; messages name the engine by the last of them."""

    def block_size(self, ggml_type: int) -> BlockSize | None:
        """Return the block size of a type; None for a type that this build does not have."""


class EngineTypes:
    """Asks an engine for types that the gguf package does not know; the engine is opened when it is first needed.

    For all other types, binding the tiers checks that engine and package agree (`require_type` in C++).
    """

    def __init__(self, open_engine: Callable[[], SizedEngine]) -> None:
        """Open nothing yet; `block` raises what `open_engine` raises."""
        self._open_engine = open_engine

    def block(self, ggml_type: int) -> BlockSize | None:
        """Return the block size of a type; None for a type that neither the package nor the engine knows."""
        return PACKAGE_TYPES.block(ggml_type) or self._engine.block_size(ggml_type)

    @property
    def advice(self) -> str:
        """Who does not know a type, and what to do then, as the end of the sentence "type 42 is none that"."""
        return (
            f"the engine {self._engine.library_paths[-1]} knows, nor the gguf package: use a newer llama.cpp, as one "
            "that you build (--llama-cpp DIR), or convert the model to another type"
        )

    @cached_property
    def _engine(self) -> SizedEngine:
        return self._open_engine()


def block_size(function: Callable[..., int], ggml_type: int) -> BlockSize | None:
    """Return the block size of a type, by the function of one of our libraries that tells it."""
    elements, n_bytes = ct.c_int64(), ct.c_int64()
    if not function(ggml_type, ct.byref(elements), ct.byref(n_bytes)):
        return None
    return BlockSize(elements.value, n_bytes.value)
