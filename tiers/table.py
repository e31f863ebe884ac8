"""Which bytes of a GGUF belong to which expert."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from expertier.planner.demand import LayerDemand
from expertier.tiers.expert_tensors import collect_layers
from expertier.tiers.file_identity import FileIdentity
from expertier.tiers.gguf_header import read_header
from expertier.tiers.layer import ExpertLayer
from expertier.tiers.slot_layout import SlotLayout


@dataclass(frozen=True)
class ExpertTable:
    """The experts of one GGUF: which layers have them, and where in the file each one lies.

    `layer` counts MoE layers from 0 everywhere; `layers[layer].block` is the N of the file's `blk.N.`. Only
    the file's header is read, never a weight.
    """

    path: Path
    architecture: str
    top_k: int
    layers: tuple[ExpertLayer, ...]
    identity: FileIdentity

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Self:
        """Read the table of the model at `path`.

        Raises `NotGgufError`, `TruncatedModelError` (also where a tensor's data reaches past the end of the
        file), `NotMoeError` or `UnsupportedLayoutError`, all of them `ModelError`s.
        """
        absolute = Path(path).absolute()
        header = read_header(absolute)
        layers, top_k = collect_layers(absolute, header)
        return cls(absolute, header.architecture, top_k, layers, FileIdentity.of(header.file_stat))

    @property
    def n_layers(self) -> int:
        """How many layers have experts."""
        return len(self.layers)

    @property
    def file_bytes(self) -> int:
        """The file's size."""
        return self.identity.n_bytes

    @cached_property
    def expert_bytes_total(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.n_experts * layer.expert_bytes for layer in self.layers)

    @cached_property
    def expert_ranges(self) -> tuple[tuple[int, int], ...]:
        """The expert tensors' [begin, end) in the file, in its order."""
        return tuple(
            sorted(
                (matrix.file_offset, matrix.file_offset + layer.n_experts * matrix.expert_bytes)
                for layer in self.layers
                for matrix in layer.matrices
            )
        )

    @cached_property
    def slot_layouts(self) -> tuple[SlotLayout, ...]:
        """How a slot of each layer holds its expert."""
        return tuple(SlotLayout.of(layer.matrices) for layer in self.layers)

    def span(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """Return an expert's (offset, bytes) in the file, one a matrix; `IndexError` where there is none."""
        self.check_experts(layer, (expert,))
        return self.layers[layer].spans(expert)

    def check_experts(self, layer: int, experts: Sequence[int]) -> None:
        """Raise `IndexError` unless the layer exists and has all of `experts`."""
        if not 0 <= layer < self.n_layers:
            raise IndexError(f"asked for layer {layer}: the model has MoE layers 0 to {self.n_layers - 1}")
        n_experts = self.layers[layer].n_experts
        if experts and not (min(experts) >= 0 and max(experts) < n_experts):
            wrong = next(expert for expert in experts if not 0 <= expert < n_experts)
            raise IndexError(
                f"asked for expert {wrong} of layer {layer}: it has experts 0 to {n_experts - 1}"
            )

    def layer_demands(self) -> list[LayerDemand]:
        """Return what every layer asks of a budget, for `plan_layers`."""
        return [
            LayerDemand(
                layer=number,
                n_experts=layer.n_experts,
                top_k=min(self.top_k, layer.n_experts),
                slot_bytes=layout.slot_bytes,
                fixed_bytes=layout.fixed_bytes,
            )
            for number, (layer, layout) in enumerate(zip(self.layers, self.slot_layouts, strict=True))
        ]
