"""The slab's low end as the place where the engine computes (ggml_proxy/compute_region.h), and its moves."""

from __future__ import annotations

import ctypes as ct
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from expertier.engine_adapter import proxy_abi as abi
from expertier.engine_adapter.bound_structs import BoundStructs
from expertier.errors import ConfigError, EngineError
from expertier.tiers.manager import TierManager

_log = logging.getLogger(__name__)

MOVE_COST_BYTES = 1 << 29
"""Missed bytes that are worth a move of the boundary down and up again, beside those that it gives room to.

Each of the two took five milliseconds on an H200 (docs/measurements.md, "The boundary under an engine"), whose link
brings so many bytes in ten.
"""

CUT_LAYER_BYTES = 256 << 10
"""What a graph costs, in missed bytes, for each layer that has lost its slot for every expert to the boundary.

Its ids are looked up where they would be slot ids: that takes about as long as a link of PCIe 5 needs for so many.
"""

_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ComputeCounts:
    """What the engine has of the slab, in bytes, and how often the boundary has moved.

    Nanoseconds, of all moves together: `move_ns`, of which `queue_ns` queueing `copies` calls of the device and
    `wait_ns` waiting for them, the rest deciding; before that `drain_ns` waiting for what the engine had queued.
    """

    moves_up: int
    moves_down: int
    failed_moves: int
    move_ns: int
    drain_ns: int
    queue_ns: int
    wait_ns: int
    copies: int
    boundary_bytes: int
    needed_bytes: int
    buffers: int
    buffer_bytes: int


def computes_in_slab(proxy: ct.CDLL, wanted: bool | Literal["auto"], device: str) -> bool:
    """Whether the engine's compute buffers on ggml's device `device` are to lie in the slab.

    `auto` wants that on CUDA. A release of llama.cpp that allocates weights by the same call cannot have it.

    Raises:
        ConfigError: it was asked for on a device whose backend ends the process at a part of a buffer.
    """
    if wanted is True and device.startswith("RPC"):
        raise ConfigError(
            f"MOE_SLAB_COMPUTE=1 was asked for on {device}: RPC's backend knows whole buffers only; set it to `auto`"
        )
    if wanted == "auto":
        wanted = re.fullmatch(r"CUDA\d+", device, re.ASCII) is not None
    return wanted and bool(proxy.expertier_proxy_can_wrap())


class SlabCompute:
    """A bound engine's compute buffers in the slab of its tiers, until the tiers are unbound."""

    def __init__(
        self,
        proxy: ct.CDLL,
        tiers: int,
        manager: TierManager,
        structs: BoundStructs,
        note_error: Callable[[BaseException], None],
    ) -> None:
        """Open the region for the proxy's `tiers`; `note_error` gets what made a move fail.

        Raises:
            EngineError: the proxy refused.
        """
        self._proxy = proxy
        self._tiers = tiers
        self._manager = manager
        self._structs = structs
        self._note_error = note_error
        self._move = abi.MoveCallback(self._serve_move)
        self._struct = abi.Compute(
            move=self._move,
            context=None,
            binding=ct.pointer(structs.binding),
            compute_bytes=manager.compute_bytes,
            most_bytes=manager.most_compute_bytes,
            move_cost_bytes=MOVE_COST_BYTES,
            cut_cost_bytes=CUT_LAYER_BYTES * manager.n_cut_layers,
        )
        error = ct.create_string_buffer(_ERROR_BYTES)
        if not proxy.expertier_tiers_open_compute(tiers, ct.byref(self._struct), error, len(error)):
            raise EngineError(
                f"the engine cannot compute in the slab: {error.value.decode(errors='replace')}; set "
                "MOE_SLAB_COMPUTE=0"
            )
        _log.info("event=slab_compute enabled=1 compute_bytes=%d", manager.compute_bytes)

    def counts(self) -> ComputeCounts:
        """Return what the region holds, and its moves so far."""
        counts = abi.ComputeCounts()
        self._proxy.expertier_tiers_compute_counts(self._tiers, ct.byref(counts))
        return ComputeCounts(**{field.name: getattr(counts, field.name) for field in fields(ComputeCounts)})

    def _serve_move(self, _context: Any, n_bytes: int, done: Any) -> None:
        """Move the boundary; C++ takes the new layout over in any case, and believes in the move as `done` says."""
        try:
            try:
                self._manager.move_boundary(n_bytes)
            finally:
                self._structs.rewrite(self._manager.engine_layout())
                self._struct.cut_cost_bytes = CUT_LAYER_BYTES * self._manager.n_cut_layers
                # With work left to do before slots are used, nothing counts as free: the next graph asks again.
                self._struct.compute_bytes = self._manager.compute_bytes * self._manager.slots_are_sound
            done[0] = abi.FILLED
        except BaseException as error:  # nothing may propagate into the engine's C++ frames
            self._note_error(error)
