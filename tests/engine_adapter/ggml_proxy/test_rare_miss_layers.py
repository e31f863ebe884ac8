"""Layers that hardly ever miss an expert are not predicted: missed bytes decide, and the decision is taken anew."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine_runs.native_build import load_proxy_part

MIB = 1 << 20

Play = Callable[..., list[bool]]


@pytest.fixture(scope="module")
def library(engine_cache) -> ctypes.CDLL:
    assert engine_cache
    loaded = load_proxy_part("rare_miss_layers", "prefetch/rare_miss_layers.cpp")
    loaded.rare_miss_layers_new.restype = ctypes.c_void_p
    loaded.rare_miss_layers_delete.argtypes = [ctypes.c_void_p]
    loaded.rare_miss_layers_note.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    loaded.rare_miss_layers_update.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    loaded.rare_miss_layers_has.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return loaded


@pytest.fixture
def play(library) -> Iterator[Play]:
    """Note misses a graph at each layer's rate; return which layers rarely miss, after an update."""
    layers = library.rare_miss_layers_new(3)
    random = np.random.default_rng(0)

    def run(
        rates: tuple[float, float, float], graphs: int, expert_bytes: int, updates: bool = True
    ) -> list[bool]:
        for missing in random.poisson(rates, (graphs, 3)).tolist():
            for layer, n in enumerate(missing):
                library.rare_miss_layers_note(layers, layer, n)
        if updates:
            library.rare_miss_layers_update(layers, 3, expert_bytes)
        return [bool(library.rare_miss_layers_has(layers, layer)) for layer in range(3)]

    try:
        yield run
    finally:
        library.rare_miss_layers_delete(layers)


def test_by_what_is_missing(play):
    assert play((0.0, 0.01, 0.5), 400, 7 * MIB) == [True, True, False]


def test_by_the_bytes_of_an_expert(play):
    assert play((0.0, 0.1, 0.5), 400, MIB // 2) == [True, True, True]
    assert play((0.0, 0.1, 0.5), 400, 7 * MIB) == [True, False, False]


def test_not_before_enough_was_seen(play):
    assert play((0.0, 0.0, 0.0), 20, 7 * MIB) == [False] * 3


def test_not_between_two_settlings(play):
    assert play((0.0, 0.0, 0.0), 400, 7 * MIB) == [True] * 3
    assert play((2.0, 2.0, 2.0), 400, 7 * MIB, updates=False) == [True] * 3
    assert play((2.0, 2.0, 2.0), 1, 7 * MIB) == [False] * 3


def test_not_for_ever(play):
    """Old misses weigh less, so that a change of topic shows within some hundred graphs."""
    assert play((0.0, 0.0, 0.0), 20_000, 7 * MIB) == [True] * 3
    assert play((0.0, 0.2, 0.2), 200, 7 * MIB) == [True, False, False]
