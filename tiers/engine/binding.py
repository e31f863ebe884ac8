"""What an engine's plugin needs to know of a manager's tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertier.tiers.host_pool.copy_directory import CopyAddresses
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.slot_layout import Place, SlotLayout

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BoundMatrix:
    """One expert matrix of all slots of a layer.

    Slot `i`'s begins at `offset_from_slab_base + i * stride`, in bytes; in a streamed layer, which holds all
    experts in their own order, that of expert `e` at `streamed_offset + e * streamed_stride`.
    """

    role: str
    name: str
    ggml_type: int
    ne0: int
    ne1: int
    expert_bytes: int
    offset_from_slab_base: int
    stride: int
    streamed_offset: int
    streamed_stride: int


@dataclass(frozen=True, slots=True)
class BoundCopy:
    """A piece of an expert, from an offset in its host block to where it lies in slot 0 and as streamed expert 0."""

    source: int
    offset_from_slab_base: int
    stride: int
    streamed_offset: int
    streamed_stride: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """One layer's slots; `block` is the N of the engine's `blk.N.` tensors."""

    block: int
    n_experts: int
    n_slots: int
    matrices: tuple[BoundMatrix, ...]
    copies: tuple[BoundCopy, ...]
    streamed_bytes: int


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """Addresses and sizes that stay valid while the engine is bound.

    The directory goes to the policy's C functions (`planner/policy/calls/native.py`), the locks are laid out as
    `tiers/shared/layer_locks.py` says, and `copies` are the host pool's (`tiers/host_pool/copy_directory.py`).
    """

    slab_base: int
    slab_bytes: int
    directory_address: int
    locks_address: int
    layers: tuple[BoundLayer, ...]
    copies: CopyAddresses


@dataclass(frozen=True, slots=True, eq=False)
class EngineLayout:
    """What of a binding is another after a move of the slots.

    `n_slots` is by layer; `offsets` are those of each matrix in slot 0 from the slab's base, layer after layer. Pieces
    of experts lie there too: one at a layer's first matrix, or one at each.
    """

    directory_address: int
    n_slots: I32
    offsets: I64


def bound_layer(layer: ExpertLayer, layout: SlotLayout, n_slots: int, places: Sequence[Place]) -> BoundLayer:
    """Describe a layer of `n_slots` slots whose matrices lie at `places`, counted from the slab's base."""
    streamed = layout.place(layer.n_experts)
    matrices = tuple(
        BoundMatrix(
            role=matrix.role.value,
            name=matrix.name,
            ggml_type=matrix.ggml_type,
            ne0=matrix.ne0,
            ne1=matrix.ne1,
            expert_bytes=matrix.expert_bytes,
            offset_from_slab_base=place.offset,
            stride=place.stride,
            streamed_offset=aside.offset,
            streamed_stride=aside.stride,
        )
        for matrix, place, aside in zip(layer.matrices, places, streamed, strict=True)
    )
    pieces = zip(
        layout.copies([_relative(place, places) for place in places], 0),
        layout.copies(streamed, 0),
        strict=True,
    )
    copies = tuple(
        BoundCopy(
            source=piece.source,
            offset_from_slab_base=places[0].offset + piece.target,
            stride=place.stride,
            streamed_offset=aside.target,
            streamed_stride=at.stride,
            n_bytes=piece.n_bytes,
        )
        for (piece, aside), place, at in zip(
            pieces, places, streamed, strict=False
        )  # one piece, or one a matrix
    )
    return BoundLayer(
        layer.block, layer.n_experts, n_slots, matrices, copies, layout.range_bytes(layer.n_experts)
    )


def _relative(place: Place, places: Sequence[Place]) -> Place:
    """Return a place counted from the layer's range, which begins with its first matrix."""
    return Place(place.offset - places[0].offset, place.stride)
