from __future__ import annotations

import numpy as np
import pytest
from gguf.quants import dequantize

from expertier.engine_adapter.models.synth_blocks import (
    WEIGHT_TYPES,
    WeightType,
    ggml_type,
    random_rows,
    row_bytes,
)

_STORED = {"F32": np.float32, "F16": np.float16}


def decode(kind: WeightType, rows: np.ndarray) -> np.ndarray:
    """Decode rows of blocks with the gguf package's own code."""
    return dequantize(rows.view(_STORED.get(kind, np.uint8)), ggml_type(kind))


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_blocks_decode_to_the_asked_spread(kind: WeightType, std: float) -> None:
    rows = random_rows(np.random.default_rng(3), kind, n_rows=128, n_cols=512, std=std)
    assert rows.dtype == np.uint8
    assert rows.shape == (128, row_bytes(kind, 512))
    values = decode(kind, rows)
    assert values.shape == (128, 512)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=0.05)
    assert abs(values.mean()) < 0.13 * std  # Q4_0 has 8 values below zero and 7 above


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_no_two_rows_are_alike(kind: WeightType) -> None:
    rows = random_rows(np.random.default_rng(4), kind, n_rows=64, n_cols=256, std=1.0)
    assert len(np.unique(rows, axis=0)) == 64


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_sub_blocks_have_scales_of_their_own(kind: WeightType) -> None:
    values = decode(kind, random_rows(np.random.default_rng(5), kind, n_rows=256, n_cols=256, std=1.0))
    sub_block = 32 if kind == "Q4_K" else 16
    spread = values.reshape(-1, sub_block).std(axis=1)
    assert spread.max() > 2 * spread.min()
    assert spread.min() > 0.1
