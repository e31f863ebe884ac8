"""What an engine's plugin has to know about a manager's tiers."""

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
    """Where one expert matrix lies in all slots of a layer; all offsets and strides are in bytes.

    The matrix of slot `i` begins at `offset_from_slab_base + i * stride`. In the prefill stream a place holds all
    experts of a layer in their order; there the matrix of expert `e` begins at `streamed_offset + e * streamed_stride`.
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
    """One copy of `n_bytes` that fills part of a slot, or of an expert's place in the prefill stream.

    It copies from offset `source` of the expert's host block. Targets are numbered as in `BoundMatrix`.
    """

    source: int
    offset_from_slab_base: int
    stride: int
    streamed_offset: int
    streamed_stride: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """One layer's slots; `block` is the N of the engine's tensors `blk.N.`.

    `streamed_bytes` is what the layer takes in the prefill stream, where it has all of its experts.
    """

    block: int
    n_experts: int
    n_slots: int
    matrices: tuple[BoundMatrix, ...]
    copies: tuple[BoundCopy, ...]
    streamed_bytes: int


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """Addresses and sizes that stay valid while the engine is bound, or until it has the slots moved (`EngineLayout`).

    `directory_address` is passed to the policy's C functions (`planner/policy/calls/native.py`). The locks at
    `locks_address` are laid out as `tiers/shared/layer_locks.py` says. `copies` describes the host pool's directory of
    copies (`tiers/host_pool/copy_directory.py`).
    """

    slab_base: int
    slab_bytes: int
    directory_address: int
    locks_address: int
    layers: tuple[BoundLayer, ...]
    copies: CopyAddresses


@dataclass(frozen=True, slots=True, eq=False)
class EngineLayout:
    """The parts of a binding that change when the slots move.

    `n_slots` has the number of slots of each layer. `offsets` has the offset of each matrix in slot 0 from the slab's
    base, for all layers one after another. The targets of `BoundLayer.copies` follow from them: the first copy goes to
    the layer's first matrix, and where there are several copies, each goes to its matrix.
    """

    directory_address: int
    n_slots: I32
    offsets: I64


def bound_layer(layer: ExpertLayer, layout: SlotLayout, n_slots: int, places: Sequence[Place]) -> BoundLayer:
    """Describe a layer of `n_slots` slots; `places` has where each matrix lies, with offsets from the slab's base."""
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
    """Return a place with its offset counted from the layer's range, which begins with the first matrix."""
    return Place(place.offset - places[0].offset, place.stride)
