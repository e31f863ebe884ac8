"""What each block of a model takes beside its experts: weights that lie on the block's own device."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from expertier.tiers.expert_tensors import collect_layers
from expertier.tiers.shards import read_shards

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Bytes of weights that are no experts, of each block as the engine counts them, from 0."""

    bytes_by_block: tuple[int, ...]

    @property
    def n_blocks(self) -> int:
        """How many blocks the engine places: the header's `block_count`, those for further tokens included."""
        return len(self.bytes_by_block)


def read_block_weights(path: str | os.PathLike[str]) -> BlockWeights:
    """Return the weights of the model at `path`, which may be any of its shards. Only headers are read.

    Raises `ModelError`s as `ExpertTable.from_gguf` does.
    """
    shards = read_shards(Path(path).absolute())
    layers, _ = collect_layers(shards)
    experts = {matrix.name for layer in layers for matrix in layer.matrices}
    header = shards[0].header
    said = header.values.get(f"{header.architecture}.block_count")
    sizes: dict[int, int] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            found = _BLOCK.match(tensor.name)
            if found is not None and tensor.name not in experts:
                block = int(found[1])
                sizes[block] = sizes.get(block, 0) + (tensor.n_bytes or 0)
    n_blocks = said if isinstance(said, int) else max(sizes, default=-1) + 1
    return BlockWeights(tuple(sizes.get(block, 0) for block in range(n_blocks)))
