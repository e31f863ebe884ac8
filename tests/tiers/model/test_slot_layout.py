"""Slot layouts: which form, where matrices lie, and that nothing overlaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import LayerDemand
from expertier.tiers.model.matrix import ExpertMatrix, Role
from expertier.tiers.model.slot_layout import (
    GUARD_BYTES,
    KERNEL_STEP,
    MATRIX_ALIGNMENT,
    RANGE_ALIGNMENT,
    SlotLayout,
)

ROLES = (Role.GATE, Role.UP, Role.DOWN)
TYPES = [kind for kind, (elements, _) in gguf.GGML_QUANT_SIZES.items() if elements in (1, 32, 256)]


def matrices(kinds: Sequence[gguf.GGMLQuantizationType], n_embd: int, n_ff: int) -> list[ExpertMatrix]:
    made = []
    for role, kind in zip(ROLES, kinds, strict=False):
        ne0, ne1 = (n_ff, n_embd) if role is Role.DOWN else (n_embd, n_ff)
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        made.append(ExpertMatrix(role, str(role), int(kind), size, ne0, ne1, ne0 // elements * size * ne1, 0))
    return made


def kinds(*names: str) -> list[gguf.GGMLQuantizationType]:
    return [gguf.GGMLQuantizationType[name] for name in names]


def test_one_type_makes_one_piece() -> None:
    layout = SlotLayout.of(matrices(kinds("Q4_K", "Q4_K", "Q4_K"), 2048, 768))
    one = 768 * 8 * 144
    assert layout.stride == layout.slot_bytes == 3 * one
    assert layout.block_offsets == (0, one, 2 * one)
    assert [(p.offset, p.stride) for p in layout.place(5)] == [(k * one, 3 * one) for k in range(3)]
    assert layout.range_bytes(5) == 5 * 3 * one + GUARD_BYTES
    assert [(c.source, c.target, c.n_bytes) for c in layout.copies(layout.place(5), 2)] == [
        (0, 6 * one, 3 * one)
    ]


def test_mixed_types_make_one_piece_where_the_gap_is_small() -> None:
    layout = SlotLayout.of(matrices(kinds("Q4_K", "Q4_K", "Q6_K"), 2048, 768))
    assert layout.stride % math.lcm(144, 210, 32) == 0
    assert layout.stride - sum(layout.matrix_bytes) <= 0.01 * sum(layout.matrix_bytes)


def test_a_wasteful_gap_makes_an_array_a_matrix() -> None:
    layout = SlotLayout.of(matrices(kinds("Q4_K", "Q4_K", "Q6_K"), 256, 256))
    gate, down = 256 * 144, 256 * 210
    assert layout.stride == 0
    assert layout.slot_bytes == 2 * gate + down
    places = layout.place(3)
    array = 3 * gate + GUARD_BYTES
    assert [(p.offset, p.stride) for p in places] == [(0, gate), (array, gate), (2 * array, down)]
    assert [(c.source, c.target, c.n_bytes) for c in layout.copies(places, 1)] == [
        (0, gate, gate),
        (gate, array + gate, gate),
        (2 * gate, 2 * array + down, down),
    ]


@given(
    st.lists(st.sampled_from(TYPES), min_size=2, max_size=3),
    st.integers(1, 8).map(lambda n: 256 * n),
    st.integers(1, 8).map(lambda n: 256 * n),
    st.integers(1, 40),
)
def test_every_layout_holds_its_experts_apart(
    types: list[gguf.GGMLQuantizationType], n_embd: int, n_ff: int, n_slots: int
) -> None:
    made = matrices(types, n_embd, n_ff)
    layout = SlotLayout.of(made)
    places = layout.place(n_slots)
    size = layout.range_bytes(n_slots)

    spans = sorted(
        (place.offset + slot * place.stride, place.offset + slot * place.stride + matrix.expert_bytes)
        for slot in range(n_slots)
        for place, matrix in zip(places, made, strict=True)
    )
    assert spans[0][0] >= 0
    for (_, end), (begin, _) in pairwise(spans):
        assert end <= begin
    assert size - spans[-1][1] >= GUARD_BYTES
    assert size % RANGE_ALIGNMENT == 0
    for place, matrix in zip(places, made, strict=True):
        assert place.stride % matrix.type_bytes == 0
        assert place.offset % MATRIX_ALIGNMENT == 0

    demand = LayerDemand(0, n_slots, 1, layout.slot_bytes, layout.fixed_bytes)
    assert size <= demand.bytes_for(n_slots), "a plan would promise more than fits"
    assert layout.slot_bytes <= 1.01 * sum(layout.matrix_bytes)

    for slot in range(n_slots):
        copies = layout.copies(places, slot)
        for number, (place, matrix) in enumerate(zip(places, made, strict=True)):
            source = layout.block_offsets[number]
            target = place.offset + slot * place.stride
            assert any(
                copy.source <= source
                and source + matrix.expert_bytes <= copy.source + copy.n_bytes
                and target - source == copy.target - copy.source
                for copy in copies
            ), "a copy must bring the matrix to its place"
        for copy in copies:
            assert copy.source + copy.n_bytes <= layout.block_bytes

    order = list(range(n_slots))[::-1]
    blocks = [1000 + 7 * slot for slot in order]
    assert layout.fills(places, order, blocks, 500).tolist() == [
        [500 + copy.target, block + copy.source, copy.n_bytes]
        for slot, block in zip(order, blocks, strict=True)
        for copy in layout.copies(places, slot)
    ], "many slots are filled as each alone would be"
    assert layout.fills(places, [], [], 500).shape == (0, 3)


def test_guards_follow_every_array() -> None:
    layout = SlotLayout.of(matrices(kinds("Q4_K", "Q4_K", "Q6_K"), 256, 256))
    places = layout.place(3)
    for place, size, following in zip(places, layout.matrix_bytes, [*places[1:], None], strict=True):
        end = place.offset + 2 * place.stride + size
        limit = following.offset if following is not None else layout.range_bytes(3)
        assert limit - end >= GUARD_BYTES


@pytest.mark.parametrize("n_slots", [1, 7])
def test_range_bytes_grow_with_the_slots(n_slots: int) -> None:
    layout = SlotLayout.of(matrices(kinds("Q8_0", "Q8_0", "Q8_0"), 64, 32))
    assert layout.range_bytes(n_slots) < layout.range_bytes(n_slots + 1)


@given(
    st.lists(
        st.sampled_from([kind for kind in TYPES if gguf.GGML_QUANT_SIZES[kind][0] <= 32]),
        min_size=3,
        max_size=3,
    ),
    st.integers(1, 24).map(lambda n: 32 * n),
    st.integers(1, 24).map(lambda n: 32 * n),
    st.integers(1, 5),
)
def test_what_kernels_read_past_the_last_row_is_a_block_of_the_same_type_or_zeros(
    types: list[gguf.GGMLQuantizationType], n_embd: int, n_ff: int, n_slots: int
) -> None:
    made = matrices(types, n_embd, n_ff)
    layout = SlotLayout.of(made)
    held = [
        (place.offset + slot * place.stride, matrix)
        for slot in range(n_slots)
        for place, matrix in zip(layout.place(n_slots), made, strict=True)
    ]
    for begin, matrix in held:
        elements = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(matrix.ggml_type)][0]
        if elements == 1:
            continue
        end = begin + matrix.expert_bytes
        for block in range(-(matrix.ne0 // -KERNEL_STEP) * KERNEL_STEP // elements - matrix.ne0 // elements):
            at = end + block * matrix.type_bytes
            under = [
                (other_begin, other)
                for other_begin, other in held
                if other_begin < at + matrix.type_bytes and at < other_begin + other.expert_bytes
            ]
            for other_begin, other in under:  # where there is none, it is a guard
                assert other.ggml_type == matrix.ggml_type
                assert (at - other_begin) % matrix.type_bytes == 0
            assert under or at >= max(start for start, _ in held) or not layout.stride, "a gap, of any bytes"


def test_shards_of_mixed_types_get_arrays() -> None:
    assert SlotLayout.of(matrices(kinds("Q4_0", "Q4_0", "Q8_0"), 2048, 384)).stride == 0
    assert SlotLayout.of(matrices(kinds("Q4_0", "Q4_0", "Q4_0"), 2048, 384)).stride > 0
    assert SlotLayout.of(matrices(kinds("Q4_0", "Q4_0", "Q8_0"), 2048, 512)).stride > 0
