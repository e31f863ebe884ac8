"""The bytes of each block's weights without its experts; these weights lie on the block's device."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from expertier.tiers.model.expert_tensors import collect_layers
from expertier.tiers.model.file_shards import read_file_shards
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, TypeSizes

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The bytes of weights that are not experts, for each block as the engine counts blocks, from 0.

    The blocks from `n_used` on only predict further tokens. The engine places them on devices but loads no weights of
    them.
    """

    bytes_by_block: tuple[int, ...]
    n_used: int

    @property
    def n_blocks(self) -> int:
        """How many blocks the engine places: the header's `block_count`."""
        return len(self.bytes_by_block)


def read_block_weights(path: str | os.PathLike[str], type_sizes: TypeSizes = PACKAGE_TYPES) -> BlockWeights:
    """Return the weights of the model at `path`, which may be any of its shards. Only headers are read.

    Raises the same `ModelError`s as `ExpertTable.from_gguf`.
    """
    shards = read_file_shards(Path(path).absolute(), type_sizes)
    layers = collect_layers(shards, type_sizes)
    experts = {matrix.name for layer in layers for matrix in layer.matrices}
    header = shards[0].header
    said, unused = (
        header.values.get(f"{header.architecture}.{key}") for key in ("block_count", "nextn_predict_layers")
    )
    sizes: dict[int, int] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            found = _BLOCK.match(tensor.name)
            if found is not None and tensor.name not in experts:
                block = int(found[1])
                sizes[block] = sizes.get(block, 0) + (tensor.n_bytes or 0)
    n_blocks = said if isinstance(said, int) else max(sizes, default=-1) + 1
    n_used = n_blocks - unused if isinstance(unused, int) else n_blocks
    return BlockWeights(
        tuple(sizes.get(block, 0) if block < n_used else 0 for block in range(n_blocks)), n_used
    )
