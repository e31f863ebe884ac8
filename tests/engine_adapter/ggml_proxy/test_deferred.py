"""Slots that queued work may still read are kept once and dropped once, although two threads empty the list."""

from __future__ import annotations

import ctypes

import pytest

from engine_runs.native_build import load_proxy_part

N_OBJECTS = 200_000


@pytest.mark.parametrize("run", [1, 3, 40])
def test_each_object_is_dropped_once(engine_cache: object, run: int) -> None:
    """`make sanitize` runs this as well: without the lock, objects are lost or freed twice."""
    assert engine_cache
    drop = load_proxy_part("deferred").deferred_drop
    drop.argtypes, drop.restype = [ctypes.c_long, ctypes.c_int], ctypes.c_long
    assert drop(N_OBJECTS, run) == N_OBJECTS
