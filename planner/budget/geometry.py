"""The parts of a model beside its experts that take memory, as numbers; `tiers/model/geometry.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What one block of a model keeps from token to token.

    `k_width` and `v_width` are elements a token; 0 means that the block keeps none, as compressed attention keeps no V.
    `window` is how many tokens a sliding block looks back, and 0 for a block that looks back all the way. `index_width`
    is the elements of keys that sparse attention keeps besides. `state_bytes` is the state that a recurrent block keeps
    for each sequence, whatever the context length.
    """

    k_width: int = 0
    v_width: int = 0
    window: int = 0
    index_width: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes that decide what a model takes beside its experts. Widths are elements.

    `device_weight_bytes` are the weights that lie where the layers run, and `host_weight_bytes` the weights that stay
    in RAM, which are the token embedding. `experts_width` is what the experts of one token produce in a layer with all
    matrices before the last one: top-k times gate, up and their product, in the layer where that is most. `top_k` is
    the largest of any layer. `query_width` is the width of all heads side by side. `n_ctx_train` is the context that
    the model was trained with, in tokens (0: unknown). `notes` say what is only estimated.
    """

    architecture: str
    n_embd: int
    n_vocab: int
    n_heads: int
    top_k: int
    query_width: int
    experts_width: int
    dense_width: int
    blocks: tuple[BlockMemory, ...]
    device_weight_bytes: int
    host_weight_bytes: int
    streams: int = 1
    n_ctx_train: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kv_width(self) -> int:
        """The widest block's K."""
        return max((block.k_width for block in self.blocks), default=0)

    @property
    def has_full_attention(self) -> bool:
        """Whether some blocks look back all the way."""
        return any(block.k_width and not block.window for block in self.blocks)
