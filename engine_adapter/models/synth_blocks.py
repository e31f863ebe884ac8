"""Random weights, written directly in ggml's block formats, without a quantiser.

Every format draws its quants uniformly and picks its scales so that the decoded values have a mean of about
zero and the standard deviation that was asked for. That keeps the activations of a random model sane through
all its layers.

| type | block | decoded value | drawn |
|---|---|---|---|
| F32, F16 | 1 | as stored | normal |
| Q8_0 | 32 | d * q, q in -128..127 | q, d |
| Q4_0 | 32 | d * (q - 8), q in 0..15 | q, d |
| Q4_K | 256 | d * scale * q - dmin * min, q in 0..15, eight 6-bit scales and mins | q, scale, min, d |
| Q6_K | 256 | d * scale * (q - 32), q in 0..63, sixteen signed 8-bit scales | q, scale, d |
| IQ4_NL | 32 | d * one of 16 values, -127 to 113 | q, d |
| IQ4_XS | 256 | d * (scale - 32) * one of the same, eight 6-bit scales | q, scale, d |
| IQ3_XXS | 256 | d * (2 scale + 1) / 4 * entry of a grid, with signs, eight 4-bit scales | entry, sign, scale, d |
| MXFP4 | 32 | 2^(e - 128) * one of 16 values, -12 to 12 | q, e: one of two |
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log2
from typing import Literal, get_args

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

WeightType = Literal["F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "MXFP4"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)

Bytes = NDArray[np.uint8]

_BYTE_STD = 73.9  # of a uniform signed byte
_NIBBLE_STD = 4.61  # of a uniform 4-bit quant
_SIX_BIT_STD = 18.47  # of a uniform 6-bit quant
_K_SCALE_RMS = 42.0  # of a uniform integer in 16..63
_IQ4_STD = 67.18  # of the sixteen values of IQ4_NL and IQ4_XS
_IQ4_SCALE_RMS = 20.69  # of a uniform integer in 8..31
_IQ3_GRID_RMS = 30.85  # of all the grid's entries
_IQ3_SCALE_RMS = 4.617  # of (2 scale + 1) / 4, scale in 0..15
_MXFP4_RMS = 5.852  # of its sixteen values


def ggml_type(name: WeightType) -> GGMLQuantizationType:
    """Return the gguf package's enumerator of a weight type."""
    return GGMLQuantizationType[name]


def block_elements(name: WeightType) -> int:
    """Return how many weights one block holds; a row's length must be a multiple of it."""
    elements, _ = GGML_QUANT_SIZES[ggml_type(name)]
    return int(elements)


def row_bytes(name: WeightType, n_cols: int) -> int:
    """Return the bytes of one row of `n_cols` weights (a multiple of the block)."""
    elements, size = GGML_QUANT_SIZES[ggml_type(name)]
    assert n_cols % elements == 0, f"{n_cols} columns are not whole {name} blocks of {elements}"
    return int(n_cols // elements * size)


def random_rows(rng: np.random.Generator, name: WeightType, n_rows: int, n_cols: int, std: float) -> Bytes:
    """Draw `n_rows` rows of `n_cols` weights of standard deviation `std`: uint8[n_rows, row_bytes]."""
    if name == "F32":
        return (rng.standard_normal((n_rows, n_cols), dtype=np.float32) * np.float32(std)).view(np.uint8)
    if name == "F16":
        values = rng.standard_normal((n_rows, n_cols), dtype=np.float32) * np.float32(std)
        return values.astype(np.float16).view(np.uint8)
    elements, size = GGML_QUANT_SIZES[ggml_type(name)]
    # First all bytes are random; the quants stay so, and the scales are then written over them.
    blocks = rng.integers(0, 256, (n_rows * n_cols // elements, size), dtype=np.uint8)
    _SET_SCALES[name](rng, blocks, std)
    return blocks.reshape(n_rows, row_bytes(name, n_cols))


def _scale_q8_0(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write d into Q8_0 blocks."""
    blocks[:, 0:2] = _halves(rng, len(blocks), std / _BYTE_STD)


def _scale_q4_0(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write d into Q4_0 blocks."""
    blocks[:, 0:2] = _halves(rng, len(blocks), std / _NIBBLE_STD)


def _scale_q4_k(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write d, dmin and the twelve bytes of packed 6-bit scales and mins into Q4_K blocks."""
    n_blocks = len(blocks)
    scales = rng.integers(16, 64, (n_blocks, 8), dtype=np.uint8)
    # A min near its scale, with dmin = 7.5 d, centres each sub-block on about zero.
    mins = np.clip(scales + rng.integers(-1, 2, (n_blocks, 8), dtype=np.int8), 0, 63).astype(np.uint8)
    d = _halves(rng, n_blocks, std / (_K_SCALE_RMS * _NIBBLE_STD))
    blocks[:, 0:2] = d
    blocks[:, 2:4] = (d.view(np.float16) * np.float16(7.5)).view(np.uint8)
    blocks[:, 4:8] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    blocks[:, 8:12] = mins[:, :4] | mins[:, 4:] >> 4 << 6
    blocks[:, 12:16] = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4


def _scale_q6_k(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write the sixteen signed scales and d into Q6_K blocks (quants 192 bytes, scales 16, d 2)."""
    n_blocks = len(blocks)
    magnitude = rng.integers(16, 64, (n_blocks, 16), dtype=np.int8)
    sign = rng.integers(0, 2, (n_blocks, 16), dtype=np.int8) * 2 - 1
    blocks[:, 192:208] = (magnitude * sign).view(np.uint8)
    blocks[:, 208:210] = _halves(rng, n_blocks, std / (_K_SCALE_RMS * _SIX_BIT_STD))


def _scale_iq4_nl(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write d into IQ4_NL blocks."""
    blocks[:, 0:2] = _halves(rng, len(blocks), std / _IQ4_STD)


def _scale_iq4_xs(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write d and the 6-bit scales (high bits first, two to a byte after them) into IQ4_XS blocks."""
    n_blocks = len(blocks)
    magnitude = rng.integers(8, 32, (n_blocks, 8), dtype=np.int8)
    sign = rng.integers(0, 2, (n_blocks, 8), dtype=np.int8) * 2 - 1
    scales = (32 + magnitude * sign).astype(np.uint16)
    high = np.bitwise_or.reduce(scales >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    blocks[:, 0:2] = _halves(rng, n_blocks, std / (_IQ4_SCALE_RMS * _IQ4_STD))
    blocks[:, 2:4] = high.reshape(n_blocks, 1).view(np.uint8)
    blocks[:, 4:8] = scales[:, 0::2] & 15 | (scales[:, 1::2] & 15) << 4


def _scale_iq3_xxs(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write d into IQ3_XXS blocks; the grid's entries, the signs and the scales stay random."""
    blocks[:, 0:2] = _halves(rng, len(blocks), std / (_IQ3_SCALE_RMS * _IQ3_GRID_RMS))


def _scale_mxfp4(rng: np.random.Generator, blocks: Bytes, std: float) -> None:
    """Write the exponent into MXFP4 blocks: the powers of two around the scale, as often as their mean asks."""
    scale = std / _MXFP4_RMS
    lower = floor(log2(scale))
    share_of_upper = ((scale / 2**lower) ** 2 - 1) / 3
    blocks[:, 0] = 128 + lower + (rng.random(len(blocks)) < share_of_upper)


def _halves(rng: np.random.Generator, n_blocks: int, mean: float) -> Bytes:
    """Draw one half-precision factor a block, within 20 % of `mean`: uint8[n_blocks, 2]."""
    factors = rng.uniform(0.8, 1.2, (n_blocks, 1)) * mean
    return factors.astype(np.float16).view(np.uint8)


_SET_SCALES: dict[str, Callable[[np.random.Generator, Bytes, float], None]] = {
    "Q8_0": _scale_q8_0,
    "Q4_0": _scale_q4_0,
    "Q4_K": _scale_q4_k,
    "Q6_K": _scale_q6_k,
    "IQ4_NL": _scale_iq4_nl,
    "IQ4_XS": _scale_iq4_xs,
    "IQ3_XXS": _scale_iq3_xxs,
    "MXFP4": _scale_mxfp4,
}
