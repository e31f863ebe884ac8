"""Cuts of expert matrices: all shards together are the full matrix; an impossible cut is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import UnsupportedLayoutError
from expertier.tiers.model.matrix import ExpertMatrix, Role
from expertier.tiers.split.tensor_cut import TensorCut, cut_matrix

# ggml's quantised types: elements and bytes of a block
BLOCKS = {"F32": (1, 4), "Q8_0": (32, 34), "MXFP4": (32, 17), "Q4_K": (256, 144)}


def matrix_of(ne0: int, ne1: int, kind: str = "Q8_0") -> ExpertMatrix:
    elements, n_bytes = BLOCKS[kind]
    return ExpertMatrix(
        Role.DOWN, "blk.7.ffn_down_exps.weight", 8, n_bytes, ne0, ne1, ne0 // elements * n_bytes * ne1, 4096
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[ExpertMatrix, TensorCut]:
    """A matrix and a cut of it whose pieces are whole blocks, with segments that repeat."""
    elements, _ = BLOCKS[kind := draw(st.sampled_from(sorted(BLOCKS)))]
    axis = draw(st.sampled_from((0, 1)))
    n_devices = draw(st.integers(2, 4))
    unit = elements if axis == 0 else 1
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(0, 3), min_size=n_devices, max_size=n_devices))
        segments.append((draw(st.integers(1, 2)), [n * unit for n in counts]))
    segments[0] = (1, [n + unit for n in segments[0][1]])  # nobody gets nothing
    along = sum(repeats * sum(counts) for repeats, counts in segments)
    other = draw(st.integers(1, 3))
    ne0, ne1 = (along, other) if axis == 0 else (other * elements, along)
    return matrix_of(ne0, ne1, kind), TensorCut.of_segments(axis, segments)


@given(cuts())
def test_every_byte_goes_to_one_device_and_shards_keep_their_rows(case):
    matrix, cut = case
    shards = cut_matrix(matrix, cut, [0] * len(cut.ranges))
    numbers = np.arange(matrix.expert_bytes)  # each byte by its place, in two halves of a byte each
    halves = [(numbers >> shift).astype(np.uint8) for shift in (0, 8)]
    found = []
    for piece in shards:
        gathered = []
        for half in halves:
            out = np.empty(piece.matrix.expert_bytes, np.uint8)
            piece.gather(half, out)
            gathered.append(out.astype(np.int64))
        places = gathered[0] | gathered[1] << 8
        found.append(places)
        row_bytes = matrix.expert_bytes // matrix.ne1
        rows = places.reshape(piece.matrix.ne1, -1) // row_bytes
        assert (rows == rows[:, :1]).all(), "a row of a shard comes from several rows"
        assert (np.diff(places) > 0).all(), "a shard is in another order than the file"
    assert sorted(np.concatenate(found).tolist()) == numbers.tolist()


@given(cuts())
def test_a_shard_is_a_matrix_of_its_own(case):
    matrix, cut = case
    for device, piece in enumerate(cut_matrix(matrix, cut, range(len(cut.ranges)))):
        shard = piece.matrix
        elements = matrix.ne0 * matrix.ne1 * matrix.type_bytes // matrix.expert_bytes
        assert shard.expert_bytes == shard.ne0 // elements * matrix.type_bytes * shard.ne1
        assert shard.file_offset == device
        assert (shard.ne0 == matrix.ne0) if cut.axis == 1 else (shard.ne1 == matrix.ne1)


def test_a_fused_matrix_gives_each_device_rows_of_both_halves():
    matrix = matrix_of(32, 8)
    cut = TensorCut.of_segments(1, [(2, [3, 1])])  # gate and up, four rows each
    first, second = cut_matrix(matrix, cut, [0, 0])
    assert cut.ranges == (((0, 3), (4, 7)), ((3, 4), (7, 8)))
    assert first.columns == ((0, 3 * 34), (4 * 34, 7 * 34))
    assert second.matrix.ne1 == 2


def test_every_device_has_the_full_mirrored_tensor():
    matrix = matrix_of(64, 3)
    for piece in cut_matrix(matrix, TensorCut.mirrored(2), [10, 20]):
        out = np.empty(matrix.expert_bytes, np.uint8)
        full = np.arange(matrix.expert_bytes).astype(np.uint8)
        piece.gather(full, out)
        assert (out == full).all()
        assert piece.matrix.expert_bytes == matrix.expert_bytes


def test_a_piece_that_ends_inside_of_a_block_is_refused():
    with pytest.raises(UnsupportedLayoutError, match=r"blk\.7\.ffn_down.* at 128 .*block of 256 quantised"):
        cut_matrix(matrix_of(512, 4, "Q4_K"), TensorCut.of_segments(0, [(1, [128, 384])]), [0, 0])


@pytest.mark.parametrize(("axis", "what"), [(0, "element"), (1, "row")])
def test_a_device_that_would_get_nothing_is_refused(axis, what):
    with pytest.raises(UnsupportedLayoutError, match=rf"device 0 .*no {what} of it.*fewer devices"):
        cut_matrix(matrix_of(256, 256), TensorCut.of_segments(axis, [(1, [0, 256])]), [0, 0])


def test_a_cut_between_experts_is_refused():
    with pytest.raises(UnsupportedLayoutError, match="along axis 2, between experts"):
        cut_matrix(matrix_of(256, 256), TensorCut.of_segments(2, [(1, [8, 8])]), [0, 0])


def test_a_cut_of_another_shape_is_refused():
    with pytest.raises(
        UnsupportedLayoutError, match="splits 128 elements along axis 0, but the file's tensor has 256"
    ):
        cut_matrix(matrix_of(256, 4), TensorCut.of_segments(0, [(1, [64, 64])]), [0, 0])
