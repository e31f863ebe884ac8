"""How many layers ahead: found where copies are slow or fast, and where the model foretells far or not."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from engine_runs.native_build import load_proxy_part

PER_GRAPH = 5


@pytest.fixture(scope="module")
def library(engine_cache) -> ctypes.CDLL:
    assert engine_cache
    loaded = load_proxy_part("prefetch_distance", "prefetch/distance.cpp")
    loaded.prefetch_distance_new.restype = ctypes.c_void_p
    for name in ("prefetch_distance_delete", "prefetch_distance_note", "prefetch_distance_update"):
        getattr(loaded, name).argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_int] * 2 * (name == "prefetch_distance_note"),
        ]
    return loaded


def play(
    library: ctypes.CDLL,
    used: Sequence[float],
    in_time: Sequence[float],
    *,
    first: int = 2,
    may_change: bool = True,
    graphs: int = 20_000,
    seed: int = 0,
) -> list[int]:
    """The distance that each graph runs at.

    `used` is the share of prefetches that are used, `in_time` the share of those that arrive in time, each for a
    distance of 1 to 4 layers.
    """
    random = np.random.default_rng(seed)
    distance = library.prefetch_distance_new(first, may_change)
    try:
        layers, found = first, []
        for _ in range(graphs):
            for use, arrive in random.random((PER_GRAPH, 2)) < (used[layers - 1], in_time[layers - 1]):
                library.prefetch_distance_note(distance, bool(use), bool(use and arrive))
            layers = library.prefetch_distance_update(distance)
            found.append(layers)
        return found
    finally:
        library.prefetch_distance_delete(distance)


FORETELLS_FAR = (0.75, 0.75, 0.75, 0.75)
FORETELLS_NEAR = (0.85, 0.7, 0.55, 0.4)
WORLDS: dict[str, tuple[Sequence[float], Sequence[float], int]] = {
    "copies of several layers' time": (FORETELLS_FAR, (0.0, 0.1, 0.6, 0.98), 4),
    "copies of a layer's time": (FORETELLS_FAR, (0.3, 0.97, 0.99, 0.99), 2),
    "fast copies": (FORETELLS_NEAR, (0.98, 0.99, 1.0, 1.0), 1),
    "farther ahead is in time, but wrong": (FORETELLS_NEAR, (0.2, 0.75, 0.8, 0.85), 2),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("first", [1, 2, 4])
def test_the_distance_that_pays_is_found(library, world, first):
    """From wherever it starts, most graphs run at the distance at which most are used and in time."""
    used, in_time, best = WORLDS[world]
    found = play(library, used, in_time, first=first)
    assert set(found) <= {1, 2, 3, 4}
    assert Counter(found[len(found) // 2 :]).most_common(1)[0][0] == best
    assert found[len(found) // 2 :].count(best) > 0.9 * len(found) / 2


def test_it_follows_a_change(library):
    """Trials of other distances become rare, but never stop."""
    distance = library.prefetch_distance_new(2, True)
    random = np.random.default_rng(1)

    def run(graphs: int, in_time: Sequence[float]) -> int:
        layers = 2
        for _ in range(graphs):
            for use, arrive in random.random((PER_GRAPH, 2)) < (0.75, in_time[layers - 1]):
                library.prefetch_distance_note(distance, bool(use), bool(use and arrive))
            layers = library.prefetch_distance_update(distance)
        return layers

    try:
        assert run(10_000, (0.3, 0.97, 0.99, 0.99)) == 2
        assert run(20_000, (0.1, 0.3, 0.97, 0.99)) == 3
    finally:
        library.prefetch_distance_delete(distance)


def test_a_number_that_was_asked_for_stays(library):
    assert set(play(library, FORETELLS_FAR, (0.0, 0.1, 0.6, 0.98), may_change=False, graphs=2_000)) == {2}
