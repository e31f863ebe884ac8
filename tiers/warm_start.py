"""What a routing profile has fetched at the start, in which order, and where to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from expertier.planner.profile import beyond_slots, warm_order
from expertier.tiers.chunk_size import block_size
from expertier.tiers.prefetcher import Target
from expertier.tiers.slot_layout import SlotLayout

I32 = npt.NDArray[np.int32]


def warm_fetches(
    uses: npt.NDArray[np.generic],
    slots: Sequence[int],
    layouts: Sequence[SlotLayout],
    *,
    pool_bytes: int,
) -> list[tuple[int, int, Target]]:
    """Return (layer, expert, target) of what to fetch, the most urgent first; `uses` as in `TierManager.warm_start`.

    First what the slots hold, every layer's most used expert first. Then what they have no room for goes to the host
    pool, as far as `pool_bytes` reach: the first tokens miss these, and would have to wait for the file. Copies that
    the slots' experts came through are older there, and make room where the pool is small.
    """
    fetches = [(*which, Target.FREE_SLOT) for which in _pairs(warm_order(uses, slots))]
    for layer, expert in _pairs(beyond_slots(uses, slots)):
        pool_bytes -= block_size(layouts[layer].block_bytes)
        if pool_bytes < 0:
            break
        fetches.append((layer, expert, Target.L2))
    return fetches


def _pairs(order: tuple[I32, I32]) -> Iterable[tuple[int, int]]:
    layers, experts = order
    return zip(layers.tolist(), experts.tolist(), strict=True)
