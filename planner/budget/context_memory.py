"""What a context takes: the key-value cache, as llama.cpp lays it out, and an estimate of the compute buffer."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.planner.budget.geometry import ModelGeometry
from expertier.units import KIB, round_up

CELL_PADDING = 256
"""llama.cpp rounds a cache's length up to a multiple of this number of tokens."""

_F32 = 4
_F16 = 2
_BUFFER_ALIGNMENT = 128  # of each tensor in a cache's buffer, at most
_INPUTS_BYTES = 64 * KIB  # token numbers, positions, output numbers and what aligning tensors costs
_MARGIN = 32  # one part in so many is added: some shapes with 512 experts took 2 % more than the model says


@dataclass(frozen=True, slots=True)
class ContextShape:
    """A context of `n_ctx` tokens, of which at most `n_ubatch` run at once, for `n_seqs` sequences of equal length.

    `kv_bytes` is the size of an element of the cache as a fraction (bytes, elements): (2, 1) for F16, (34, 32) for
    Q8_0. `full_windows` keeps all tokens in sliding blocks too, as llama.cpp's own default parameters do and
    llama-server does not. `n_outputs` is how many tokens of a batch have logits, None for all.
    """

    n_ctx: int = 4096
    n_ubatch: int = 512
    n_seqs: int = 1
    kv_bytes: tuple[int, int] = (2, 1)
    full_windows: bool = False
    flash_attention: bool = True
    n_outputs: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that describe no context."""
        if min(self.n_ctx, self.n_ubatch, self.n_seqs, *self.kv_bytes) < 1 or (self.n_outputs or 1) < 1:
            raise ValueError(f"not a context's shape: {self}")

    @property
    def cells(self) -> int:
        """Tokens that a sequence's cache has room for."""
        return round_up(-(-round_up(self.n_ctx, CELL_PADDING) // self.n_seqs), CELL_PADDING)

    def window_cells(self, window: int) -> int:
        """Tokens that a block's cache has room for; with `window` 0 the block does not slide and keeps all tokens."""
        if window == 0 or self.full_windows:
            return self.cells
        return round_up(min(self.cells, window + self.n_ubatch), CELL_PADDING)


def cache_bytes(geometry: ModelGeometry, shape: ContextShape) -> int:
    """Return the bytes of the key-value cache and of recurrent states.

    Exact for the attention of one kind or two (full and sliding), compressed, or beside recurrent blocks.
    """
    n_bytes, per = shape.kv_bytes
    total = 0
    for block in geometry.blocks:
        cells = shape.window_cells(block.window)
        for width in (block.k_width, block.v_width, block.index_width):
            total += round_up(width * cells // per * n_bytes, _BUFFER_ALIGNMENT) * shape.n_seqs
        total += block.state_bytes * shape.n_seqs
    return total


def compute_bytes(geometry: ModelGeometry, shape: ContextShape, n_tokens: int | None = None) -> int:
    """Estimate the compute buffer for batches of `n_tokens`, the shape's `n_ubatch` where not given.

    The estimate adds up what lives at once in llama.cpp's graphs: the masks all the time; the residual stream with the
    fragments that the allocator leaves around it (five times its width, found by measurement); and the largest of the
    stages, which are the experts' first matrices, their outputs, the logits, and queries with keys and values. It is
    meant to be above what the engine takes: the benchmark `compute_buffer.py` compares both, and docs/measurements.md
    has by how much.
    """
    tokens = min(shape.n_ubatch if n_tokens is None else n_tokens, shape.n_ctx)
    outputs = tokens if shape.n_outputs is None else min(tokens, shape.n_outputs)
    masks = _mask_cells(geometry, shape) * (_F16 if shape.flash_attention else _F32)
    attention = 2 * geometry.query_width + 3 * geometry.kv_width
    if not shape.flash_attention and geometry.kv_width:
        attention += geometry.n_heads * shape.cells
    embd = geometry.n_embd * geometry.streams
    stages = (
        geometry.experts_width,
        3 * geometry.dense_width,
        (2 * geometry.top_k + 1) * geometry.n_embd,
        attention,
        -(-geometry.n_vocab * outputs // tokens),
    )
    per_token = masks + _F32 * (max(stages) + 5 * embd)
    found = tokens * per_token + _state_bytes(geometry) + _INPUTS_BYTES
    return found + found // _MARGIN


def _mask_cells(geometry: ModelGeometry, shape: ContextShape) -> int:
    """Return the length of a token's masks: one for full attention and one for sliding blocks, where it has these."""
    cells = shape.cells if geometry.has_full_attention else 0
    windows = {shape.window_cells(block.window) for block in geometry.blocks if block.window}
    indexed = any(block.index_width for block in geometry.blocks)
    return cells * (2 if indexed else 1) + max(windows, default=0)


def _state_bytes(geometry: ModelGeometry) -> int:
    """Return what recurrent blocks add for any batch: their states are read into the buffer and written back."""
    return 2 * max((block.state_bytes for block in geometry.blocks), default=0)
