"""How several devices share a model."""

from __future__ import annotations

from enum import StrEnum


class SplitMode(StrEnum):
    """How a model is split over devices; the values are those of llama.cpp's `--split-mode`."""

    LAYER = "layer"
    """Every layer lies on one device; the devices compute one after another."""
    TENSOR = "tensor"
    """Every device has a shard of every layer; the devices compute at the same time."""
