"""What a context takes: caches by hand, the shape's rounding, and the estimate's directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner.budget.context_memory import ContextShape, cache_bytes, compute_bytes
from expertier.planner.budget.geometry import BlockMemory, ModelGeometry
from expertier.units import MIB

GEOMETRY = ModelGeometry(
    architecture="qwen3moe", n_embd=2048, n_vocab=151936, n_heads=32, top_k=8, query_width=4096,
    experts_width=8 * 3 * 768, dense_width=0, blocks=(BlockMemory(512, 512),) * 48,
    device_weight_bytes=1, host_weight_bytes=1,
)  # fmt: skip

shapes = st.builds(
    ContextShape,
    n_ctx=st.integers(1, 1 << 17),
    n_ubatch=st.integers(1, 4096),
    flash_attention=st.booleans(),
    full_windows=st.booleans(),
)


def with_blocks(*blocks: BlockMemory) -> ModelGeometry:
    return replace(GEOMETRY, blocks=blocks)


def test_a_cache_by_hand() -> None:
    shape = ContextShape(n_ctx=32768)
    assert cache_bytes(GEOMETRY, shape) == 48 * 2 * 512 * 2 * 32768 == 3072 * MIB
    assert cache_bytes(GEOMETRY, replace(shape, kv_bytes=(34, 32))) == 3072 * MIB * 34 // 64, "Q8_0"
    assert cache_bytes(GEOMETRY, replace(shape, n_ctx=32768 - 255)) == 3072 * MIB, "in steps of 256 tokens"
    assert cache_bytes(GEOMETRY, replace(shape, n_seqs=4)) == 3072 * MIB, "shared out over the sequences"


def test_sliding_compressed_indexed_and_recurrent_blocks() -> None:
    shape = ContextShape(n_ctx=8192, n_ubatch=512)
    sliding = with_blocks(BlockMemory(128, 128, window=1000))
    assert cache_bytes(sliding, shape) == 2 * 128 * 2 * 1536, "window and batch, in steps of 256"
    assert cache_bytes(sliding, replace(shape, full_windows=True)) == 2 * 128 * 2 * 8192
    assert cache_bytes(sliding, replace(shape, n_ctx=256)) == 2 * 128 * 2 * 256, "never more than the context"
    assert cache_bytes(with_blocks(BlockMemory(576)), shape) == 576 * 2 * 8192, "one K, no V"
    assert cache_bytes(with_blocks(BlockMemory(128, 128, index_width=64)), shape) == (256 + 64) * 2 * 8192
    recurrent = with_blocks(BlockMemory(state_bytes=1 << 20), BlockMemory())
    assert cache_bytes(recurrent, shape) == 1 << 20
    assert cache_bytes(recurrent, replace(shape, n_ctx=1 << 17)) == 1 << 20, "no context length changes it"
    assert cache_bytes(recurrent, replace(shape, n_seqs=3)) == 3 << 20


@given(shapes, st.integers(1, 4096))
def test_the_estimate_grows_with_the_batch_and_the_context(shape: ContextShape, tokens: int) -> None:
    narrow, wide = compute_bytes(GEOMETRY, shape, min(tokens, shape.n_ubatch)), compute_bytes(GEOMETRY, shape)
    assert 0 < narrow <= wide
    longer = replace(shape, n_ctx=2 * shape.n_ctx)
    assert compute_bytes(GEOMETRY, longer) >= wide
    assert compute_bytes(GEOMETRY, replace(shape, flash_attention=True)) <= wide or shape.flash_attention
    assert compute_bytes(GEOMETRY, replace(shape, n_outputs=1)) <= wide


def test_logits_decide_where_all_tokens_have_some() -> None:
    shape = ContextShape(n_ctx=4096, n_ubatch=512)
    logits = 512 * 151936 * 4
    assert logits < compute_bytes(GEOMETRY, shape) < 1.2 * logits
    assert compute_bytes(GEOMETRY, replace(shape, n_outputs=1)) < 0.5 * logits


@pytest.mark.parametrize(
    "change", [{"n_ctx": 0}, {"n_ubatch": 0}, {"n_seqs": 0}, {"kv_bytes": (0, 1)}, {"n_outputs": -1}]
)
def test_shapes_that_make_no_sense(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a context"):
        ContextShape(**change)  # type: ignore[arg-type]
