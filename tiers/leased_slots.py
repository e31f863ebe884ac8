"""Serves leases: brings a group's experts into slots, releases them, and tells where their matrices lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.interrupts import interrupts_deferred
from expertier.tiers.access.lease import Lease, MatrixView
from expertier.tiers.assemble import Assembly
from expertier.tiers.model.matrix import Role

I32 = npt.NDArray[np.int32]


class LeasedSlots:
    """The `LeaseHolder` of one device's tiers. Thread-safe."""

    def __init__(self, parts: Assembly) -> None:
        """Serve leases on the tiers that consist of `parts`."""
        self._has_streams = parts.device.has_streams
        self._table = parts.table
        self._slab = parts.slab
        self._usage = parts.usage
        self._fences = parts.fences
        self._admission = parts.admission

    def acquire_group(self, lease: Lease, experts: I32, held: I32) -> None:
        """Bring one group's experts into slots and pin them; write the slots into `held`."""
        self._admission.acquire(lease.layer, experts, held, lambda: not self._usage.holds_slots(lease.thread))
        if self._has_streams:
            self._fences.before_read(lease.layer, held[:-1].tolist(), lease.stream)

    def release_group(self, lease: Lease, held: I32) -> None:
        """Unpin a group's slots; a later fill waits for the reads that are queued on the lease's stream."""
        if not self._has_streams:
            self._admission.release(lease.layer, held)
            return
        with interrupts_deferred():
            if held[-1]:
                self._fences.after_read(lease.layer, held[:-1].tolist(), lease.stream)
            self._admission.release(lease.layer, held)

    def abandon_group(self, lease: Lease, held: I32) -> None:
        """Unpin the slots of a group that was never read."""
        self._admission.release(lease.layer, held)

    def forget(self, lease: Lease) -> None:
        """Note that a lease has ended."""
        self._usage.forget(lease)

    def matrix_view(self, layer: int, role: Role) -> MatrixView:
        """Return where a matrix lies in the layer's slots. Raises `ValueError` where the layer has no such matrix."""
        matrices = self._table.layers[layer].matrices
        for matrix, place in zip(matrices, self._slab.places(layer), strict=True):
            if matrix.role is role:
                return MatrixView(
                    self._slab.base + place.offset,
                    place.stride,
                    matrix.ggml_type,
                    (matrix.ne0, matrix.ne1, self._slab.slots[layer]),
                    matrix.expert_bytes,
                )
        roles = ", ".join(matrix.role for matrix in matrices)
        raise ValueError(f"asked for the {role} matrix of layer {layer}: it has {roles}")
