"""Which experts are fetched at the start, in which order, and into which tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from expertier.planner.profiles.profile import beyond_slots, warm_order
from expertier.tiers.fill.prefetcher import Target
from expertier.tiers.host_pool.chunk_size import block_size
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.slot_layout import SlotLayout

I32 = npt.NDArray[np.int32]


def warm_fetches(
    uses: npt.NDArray[np.generic],
    slots: Sequence[int],
    layouts: Sequence[SlotLayout],
    *,
    pool_bytes: int,
) -> list[tuple[int, int, Target]]:
    """Return (layer, expert, target) for each expert to fetch, the most urgent first.

    `uses` is an array [layer, expert], as for `TierManager.warm_start`. First come the most used experts, as many as
    the layer has `slots`; the first of every layer comes before the second of any. Then come the most used experts
    beyond the slots, which go to the host pool, as many as fit in `pool_bytes`: without them the first tokens would
    have to wait for the file. Experts that go into slots leave copies in the pool, too; these are older there, so a
    small pool evicts them first.
    """
    fetches = [(*which, Target.FREE_SLOT) for which in _pairs(warm_order(uses, slots))]
    for layer, expert in _pairs(beyond_slots(uses, slots)):
        pool_bytes -= block_size(layouts[layer].block_bytes)
        if pool_bytes < 0:
            break
        fetches.append((layer, expert, Target.L2))
    return fetches


def fill_order(
    layers: Sequence[ExpertLayer], uses: npt.NDArray[np.generic] | None = None
) -> list[tuple[int, int]]:
    """Return (layer, expert) of all experts, in the order in which to fill a host pool: the most used come first.

    Among experts with equally many uses the layers take turns, so that each layer gets its share of a small pool.
    """
    keys = [(layer, expert) for layer, those in enumerate(layers) for expert in range(those.n_experts)]
    if uses is None:
        return sorted(keys, key=lambda key: (key[1], key[0]))
    counts = np.asarray(uses)
    return sorted(keys, key=lambda key: (-float(counts[key]), key[1], key[0]))


def _pairs(order: tuple[I32, I32]) -> Iterable[tuple[int, int]]:
    layers, experts = order
    return zip(layers.tolist(), experts.tolist(), strict=True)
