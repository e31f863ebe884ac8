"""Routing profiles as starting points: heat for the policy, and an order to load experts in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HEAT_LIMIT = 255


def scaled_heat(counts: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return uses by layer and expert ([L, E], any numbers of 0 and more) as 8-bit heat, [L, E].

    A layer's most used expert gets 255, and the layer's other experts get their share of it; a layer without uses gets
    0. Raises `ValueError` for a count that is negative or not a number.
    """
    uses = np.asarray(counts, np.float64)
    if not (np.isfinite(uses).all() and (uses >= 0).all()):
        raise ValueError(
            "asked to take heat from counts that are negative or not numbers; count the uses anew"
        )
    most = uses.max(axis=1, keepdims=True)
    return np.rint(HEAT_LIMIT * uses / np.where(most > 0, most, 1)).astype(np.uint8)


def warm_order(
    counts: npt.NDArray[np.generic], n_slots: Sequence[int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return (layers, experts), int32: which experts to load before the first request, in this order.

    Every layer's most used expert comes first, then every layer's second, and so on up to its `n_slots`;
    experts that `counts` ([L, E]) never saw are left out. Ties go to the lower number.
    """
    uses = np.asarray(counts, np.float64)
    if len(uses) != len(n_slots):
        raise ValueError(
            f"{len(uses)} layers of counts and {len(n_slots)} of slots: give both for each layer"
        )
    ranked = np.argsort(-uses, axis=1, kind="stable")
    used = np.take_along_axis(uses, ranked, axis=1) > 0
    wanted = used & (np.arange(uses.shape[1]) < np.asarray(n_slots)[:, np.newaxis])
    place, layer = np.nonzero(wanted.T)
    return layer.astype(np.int32), ranked[layer, place].astype(np.int32)


def beyond_slots(
    counts: npt.NDArray[np.generic], n_slots: Sequence[int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return (layers, experts), int32: the experts that `warm_order` has no slots for, the most used first.

    Once the slots hold the experts of `warm_order`, these are the likeliest misses, so a host pool is filled in this
    order.
    Experts that `counts` ([L, E]) never saw are left out. Ties go to the lower layer, then the lower number.
    """
    rest = np.array(counts, np.float64)
    rest[warm_order(counts, n_slots)] = 0
    ranked = np.argsort(-rest, axis=None, kind="stable")[: np.count_nonzero(rest)]
    layer, expert = np.unravel_index(ranked, rest.shape)
    return layer.astype(np.int32), expert.astype(np.int32)
