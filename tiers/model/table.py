"""Which bytes of a GGUF, or of its shards, belong to which expert."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from expertier.planner.budget.demand import LayerDemand
from expertier.tiers.model.expert_tensors import collect_layers
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.file_shards import read_file_shards
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.slot_layout import SlotLayout
from expertier.tiers.model.span import Span
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, TypeSizes


@dataclass(frozen=True)
class ExpertTable:
    """The experts of one model: which layers have experts, and where in the model's files each expert lies.

    `layer` counts MoE layers from 0 everywhere; `layers[layer].block` is the N of the file's `blk.N.`. Offsets
    count through all `files`, as if the shards of a model lay one after another. Only headers are read, never a
    weight; the sizes of tensors follow from `type_sizes`.
    """

    files: tuple[ModelFile, ...]
    architecture: str
    layers: tuple[ExpertLayer, ...]
    type_sizes: TypeSizes = field(default=PACKAGE_TYPES, compare=False, repr=False)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str], type_sizes: TypeSizes = PACKAGE_TYPES) -> Self:
        """Read the table of the model at `path`, which may be any of its shards.

        An engine may know types that the gguf package does not know: pass the engine's `type_sizes` where you have one.

        Raises `NotGgufError`, `TruncatedModelError` (also where a tensor's data reaches past the end of a
        file), `NotMoeError` or `UnsupportedLayoutError` (also for a shard that is missing or of another
        model), all of them `ModelError`s.
        """
        shards = read_file_shards(Path(path).absolute(), type_sizes)
        layers = collect_layers(shards, type_sizes)
        files = []
        begin = 0
        for shard in shards:
            files.append(ModelFile(shard.path, begin, FileIdentity.of(shard.header.file_stat)))
            begin = files[-1].end
        return cls(tuple(files), shards[0].header.architecture, layers, type_sizes)

    @property
    def path(self) -> Path:
        """The model's file, or its first shard."""
        return self.files[0].path

    @property
    def top_k(self) -> int:
        """The largest number of experts that a token uses in any layer."""
        return max((layer.top_k for layer in self.layers), default=0)

    @property
    def n_layers(self) -> int:
        """How many layers have experts."""
        return len(self.layers)

    @property
    def file_bytes(self) -> int:
        """The size of all files together."""
        return self.files[-1].end

    @cached_property
    def expert_bytes_total(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.n_experts * layer.expert_bytes for layer in self.layers)

    @cached_property
    def expert_ranges(self) -> tuple[tuple[int, int], ...]:
        """The [begin, end) of every expert tensor in the model, in increasing order."""
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

    def span(self, layer: int, expert: int) -> list[Span]:
        """Return where an expert lies in the model, one span a matrix. Raises `IndexError` where it does not exist."""
        self.check_experts(layer, (expert,))
        return self.layers[layer].spans(expert)

    def bytes_of(self, experts_by_layer: Sequence[int]) -> int:
        """Return the bytes of `experts_by_layer[layer]` experts of every layer, all together."""
        return sum(n * layer.expert_bytes for n, layer in zip(experts_by_layer, self.layers, strict=True))

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

    def existing(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Return those of `experts` that the layer has; an empty list where there is no such layer."""
        if not 0 <= layer < self.n_layers:
            return []
        return [expert for expert in experts if 0 <= expert < self.layers[layer].n_experts]

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Return a table of some of the layers, numbered from 0 in the new table; the files stay the same."""
        return replace(self, layers=tuple(self.layers[layer] for layer in layers))

    def layer_demands(self) -> list[LayerDemand]:
        """Return the demand of each layer (experts, top-k, bytes of a slot), for `plan_layers`."""
        return [
            LayerDemand(
                layer=number,
                n_experts=layer.n_experts,
                top_k=layer.top_k,
                slot_bytes=layout.slot_bytes,
                fixed_bytes=layout.fixed_bytes,
            )
            for number, (layer, layout) in enumerate(zip(self.layers, self.slot_layouts, strict=True))
        ]
