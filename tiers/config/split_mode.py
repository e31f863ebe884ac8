"""How several devices share a model."""

from __future__ import annotations

from enum import StrEnum


class SplitMode(StrEnum):
    """As llama.cpp's `--split-mode` has it."""

    LAYER = "layer"
    """Every layer lies on one device; they compute one after another."""
    TENSOR = "tensor"
    """Every device has a shard of every layer; they compute at the same time."""
