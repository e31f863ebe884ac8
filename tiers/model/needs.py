"""What a model takes of each device beside its experts, on one device or on several that share its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from expertier.planner.budget.context_memory import ContextShape, cache_bytes
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.budget.layer_split import BlockNeeds
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.tiers.model.block_weights import BlockWeights, read_block_weights
from expertier.tiers.model.device_needs import device_needs
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable

_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """A model and the `shape` of all its contexts together, from which follow its needs of memory."""

    table: ExpertTable
    geometry: ModelGeometry
    weights: BlockWeights
    shape: ContextShape

    @classmethod
    def of(cls, table: ExpertTable, shape: ContextShape) -> Self:
        """Read the model's headers. Raises the same `ModelError`s as `ExpertTable.from_gguf`."""
        geometry = read_geometry(table.path, table.type_sizes)
        return cls(table, geometry, read_block_weights(table.path, table.type_sizes), shape)

    @property
    def n_units(self) -> int:
        """How many units llama.cpp's layer split places on devices: the blocks, and the output."""
        return self.weights.n_blocks + 1

    @property
    def output_bytes(self) -> int:
        """The bytes of weights that belong to no block; they lie on the device of the output."""
        return max(self.geometry.device_weight_bytes - sum(self.weights.bytes_by_block), 0)

    def needs_on_one_device(self, free_bytes: int, *, prefill_stream_bytes: int = 0) -> DeviceNeeds:
        """Return what the whole model takes of one device."""
        return device_needs(
            self.geometry, self.shape, free_bytes=free_bytes, prefill_stream_bytes=prefill_stream_bytes
        )

    def needs_of_share(self, units: range, free_bytes: int, *, prefill_stream_bytes: int = 0) -> DeviceNeeds:
        """Return what consecutive `units` take of a device; the last unit of the model is the output."""
        has_output = self.weights.n_blocks in units
        weights = sum(self.weights.bytes_by_block[units.start : units.stop])
        geometry = replace(
            self.geometry,
            blocks=self.geometry.blocks[units.start : units.stop],
            device_weight_bytes=weights + (self.output_bytes if has_output else 0),
            n_vocab=self.geometry.n_vocab if has_output else 0,
        )
        handed_over = min(self.shape.n_ubatch, self.shape.n_ctx) * geometry.n_embd * geometry.streams
        return device_needs(
            geometry,
            self.shape,
            free_bytes=free_bytes,
            prefill_stream_bytes=prefill_stream_bytes,
            peer_bytes=handed_over * _F32_BYTES if units.start else 0,
        )

    def blocks(self) -> list[BlockNeeds]:
        """Return for each block what it takes of the device that it lies on."""
        demands = self.table.layer_demands()
        by_block = {
            layer.block: demands[number]
            for number, layer in enumerate(self.table.layers)
            if layer.block < self.weights.n_used
        }
        found = []
        for block, weights in enumerate(self.weights.bytes_by_block):
            alone = replace(self.geometry, blocks=self.geometry.blocks[block : block + 1])
            found.append(BlockNeeds(weights + cache_bytes(alone, self.shape), by_block.get(block)))
        return found
