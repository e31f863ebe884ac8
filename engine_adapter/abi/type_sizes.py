"""Block sizes of ggml types: the gguf package's, and the engine's for those that it does not know."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Protocol

from expertier.tiers.model.type_sizes import PACKAGE_TYPES, BlockSize


class SizedEngine(Protocol):
    """What is asked of an engine here."""

    @property
    def library_paths(self) -> tuple[Path, ...]:
        """Its libraries; the last one names it."""

    def block_size(self, ggml_type: int) -> BlockSize | None:
        """Return the block of a type; None for one that this build has not, or has no more."""


class EngineTypes:
    """Asks an engine for what the gguf package does not know; the engine is opened when that is needed first.

    Binding tiers checks that the two agree on all other types (`Tiers::Tiers` in C++).
    """

    def __init__(self, open_engine: Callable[[], SizedEngine]) -> None:
        """Open nothing yet. What `open_engine` raises, `block` raises."""
        self._open_engine = open_engine

    def block(self, ggml_type: int) -> BlockSize | None:
        """Return the block of a type; None for a type that neither knows."""
        return PACKAGE_TYPES.block(ggml_type) or self._engine.block_size(ggml_type)

    @property
    def advice(self) -> str:
        """Who does not know a type, and what to do then."""
        return (
            f"the engine {self._engine.library_paths[-1]} knows, nor the gguf package: use a newer llama.cpp, as one "
            "that you build (--llama-cpp DIR), or convert the model to another type"
        )

    @cached_property
    def _engine(self) -> SizedEngine:
        return self._open_engine()


def block_size(function: Callable[..., int], ggml_type: int) -> BlockSize | None:
    """Return what one of our libraries' functions for block sizes says of a type."""
    elements, n_bytes = ct.c_int64(), ct.c_int64()
    if not function(ggml_type, ct.byref(elements), ct.byref(n_bytes)):
        return None
    return BlockSize(elements.value, n_bytes.value)
