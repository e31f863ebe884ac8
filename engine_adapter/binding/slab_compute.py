"""The slab's low end, where the engine computes (ggml_proxy/slab/compute_region.h), and moves of the slots."""

from __future__ import annotations

import ctypes as ct
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.bound_structs import BoundStructs
from expertier.engine_adapter.placement.device_traits import traits_of
from expertier.errors import ConfigError, EngineError
from expertier.planner.budget.quotas import Proposal
from expertier.tiers.manager import TierManager
from expertier.tiers.slots.rebalance import log_move

_log = logging.getLogger(__name__)

MOVE_COST_BYTES = 1 << 28
"""Missed bytes that justify moving the boundary down and up again, beyond those that the move gains.

Each of the two moves took 2.4 milliseconds on an H200 (docs/measurements/boundary.md), whose link transfers so many
bytes in five milliseconds.
"""

CUT_LAYER_BYTES = 256 << 10
"""What a graph costs, in missed bytes, for each layer that the boundary has left without a slot for every expert.

Such a layer has to look up its ids, which takes about as long as a PCIe 5 link needs to transfer so many bytes.
"""

LOOK_GRAPHS = 64
"""How many graphs run between two checks of demand; a check takes about as long as two misses."""

_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ComputeCounts:
    """What the engine uses of the slab, in bytes, and how often the boundary or the numbers of slots have moved.

    Times are in nanoseconds, for all moves together. `drain_ns` was spent waiting for what the engine had queued, and
    `move_ns` on the moves afterwards. Of `move_ns`, `queue_ns` was spent on queueing `copies` calls of the device,
    `wait_ns` on waiting for these calls, and the rest on decisions, some of them made while the calls ran.
    """

    moves_up: int
    moves_down: int
    failed_moves: int
    quota_moves: int
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

    `auto` asks the device's traits. It is not possible with releases of llama.cpp that allocate weights and compute
    buffers by the same call.

    Raises:
        ConfigError: it was asked for on a device whose backend ends the process when it is given a part of a buffer.
    """
    traits = traits_of(device)
    if wanted is True and not traits.takes_parts_of_buffers:
        raise ConfigError(
            f"MOE_SLAB_COMPUTE=1 was asked for on {device}: {traits.kind}'s backend takes full buffers only; set it to "
            "`auto`"
        )
    if wanted == "auto":
        wanted = traits.computes_in_slab
    return wanted and bool(proxy.expertier_proxy_can_wrap())


def follows_demand(wanted: bool | Literal["auto"], device: str) -> bool:
    """Whether numbers of slots are to follow demand under an engine on ggml's device `device`.

    `auto` asks the device's traits.
    """
    return traits_of(device).follows_demand if wanted == "auto" else wanted


class SlabCompute:
    """A bound engine's compute buffers in the slab of its tiers, and slots that move, until the tiers are unbound."""

    def __init__(
        self,
        proxy: ct.CDLL,
        tiers: int,
        manager: TierManager,
        structs: BoundStructs,
        note_error: Callable[[BaseException], None],
        miss_costs: Callable[[], Sequence[float]] | None,
    ) -> None:
        """Open the region for the proxy's `tiers`; `note_error` gets what made a move fail.

        Numbers of slots follow demand by `miss_costs`, which returns what a miss of each layer costs by now. With None
        the numbers of slots stay.

        Raises:
            EngineError: the proxy refused.
        """
        self._proxy = proxy
        self._tiers = tiers
        self._manager = manager
        self._structs = structs
        self._note_error = note_error
        self._miss_costs = miss_costs
        self._proposal: Proposal | None = None  # other numbers of slots that the next move is to make
        self._told = True  # whether C++ knows where the slots lie
        self._move = abi.MoveCallback(self._serve_move)
        self._look = abi.LookCallback(self._serve_look) if miss_costs is not None else abi.LookCallback()
        self._struct = abi.Compute(
            move=self._move,
            context=None,
            binding=ct.pointer(structs.binding),
            compute_bytes=manager.engine.compute_bytes,
            most_bytes=manager.engine.most_compute_bytes if manager.engine.computes_in_slab else 0,
            move_cost_bytes=MOVE_COST_BYTES,
            cut_cost_bytes=CUT_LAYER_BYTES * manager.engine.n_cut_layers,
            look=self._look,
            look_graphs=LOOK_GRAPHS,
        )
        error = ct.create_string_buffer(_ERROR_BYTES)
        if not proxy.expertier_tiers_open_compute(tiers, ct.byref(self._struct), error, len(error)):
            raise EngineError(
                f"the engine's slots cannot move: {error.value.decode(errors='replace')}; set "
                "MOE_SLAB_COMPUTE=0 and MOE_REBALANCE=0"
            )
        _log.info(
            "event=slab_compute enabled=%d compute_bytes=%d",
            manager.engine.computes_in_slab,
            manager.engine.compute_bytes,
        )

    def counts(self) -> ComputeCounts:
        """Return what the region holds, and its moves so far."""
        counts = abi.ComputeCounts()
        self._proxy.expertier_tiers_compute_counts(self._tiers, ct.byref(counts))
        return ComputeCounts(**{field.name: getattr(counts, field.name) for field in fields(ComputeCounts)})

    def _serve_move(self, _context: Any, n_bytes: int, done: Any) -> None:
        """Move the boundary, and slots to other layers where that was proposed; C++ reads the layout again in any case.

        C++ takes the move as done only where `done` says so.
        """
        proposal, self._proposal = self._proposal, None
        self._told = False
        try:
            try:
                self._manager.engine.move_boundary(
                    n_bytes, proposal.plan if proposal is not None else None, meanwhile=self._tell
                )
            finally:
                if not self._told:  # no move was needed, or it failed
                    self._tell()
            if proposal is not None:
                log_move(proposal)
            done[0] = abi.FILLED
        except BaseException as error:  # nothing may propagate into the engine's C++ frames
            self._note_error(error)

    def _tell(self) -> None:
        """Write down for C++ where the slots lie now."""
        manager, struct = self._manager, self._struct
        self._structs.rewrite(manager.engine.layout())
        struct.cut_cost_bytes = CUT_LAYER_BYTES * manager.engine.n_cut_layers
        # While work is left to do before slots can be used, no bytes count as free, so that the next graph asks again.
        struct.compute_bytes = manager.engine.compute_bytes * manager.engine.slots_are_sound
        self._told = True

    def _serve_look(self, _context: Any, wants: Any) -> None:
        """Say whether other numbers of slots would pay; C++ then asks for a move that leaves the boundary in place."""
        try:
            assert self._miss_costs is not None
            self._proposal = self._manager.propose_quotas(self._miss_costs())
            wants[0] = self._proposal is not None
        except BaseException as error:  # nothing may propagate into the engine's C++ frames
            self._note_error(error)
