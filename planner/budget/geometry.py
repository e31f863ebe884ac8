"""What of a model, beside its experts, takes memory: plain numbers, read from a file by `tiers/model/geometry.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What one block of a model keeps from token to token.

    `k_width` and `v_width` are elements a token (0: it keeps none; compressed attention keeps no V); `window` is how
    far a sliding block looks back, in tokens, 0 for all of them; `index_width` the elements of keys that sparse
    attention keeps beside; `state_bytes` the state a sequence of a recurrent block, which no context length changes.
    """

    k_width: int = 0
    v_width: int = 0
    window: int = 0
    index_width: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes that decide what a model takes beside its experts. Widths are elements.

    `device_weight_bytes` are the weights that lie where the layers run, `host_weight_bytes` those that stay in RAM: the
    token embedding. `experts_width` is what one token's experts produce in a layer, all matrices before the last one
    together: top-k times gate, up and their product, in the layer where that is most; `top_k`, too, is the most of any
    layer. `query_width` is of all heads side by side. `n_ctx_train` is the context that it was trained with, in tokens
    (0: unknown). `notes` say what is only estimated.
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
