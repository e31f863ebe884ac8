"""What C++ is told of a move of the slots, whatever came of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.slab_compute import CUT_LAYER_BYTES, SlabCompute
from expertier.errors import DeviceError

KIB = 1024


class Proxy:
    """The proxy's one call for a region."""

    def expertier_tiers_open_compute(self, _tiers, _compute, _error, _size):
        return 1


class Engine:
    """The engine's side of tiers whose boundary goes where it is asked to, and whose moves may fail."""

    compute_bytes, most_compute_bytes, computes_in_slab = 4 * KIB, 64 * KIB, True
    n_cut_layers, slots_are_sound = 1, True
    failure: Exception | None = None

    def layout(self):
        return self.compute_bytes

    def move_boundary(self, n_bytes, _plan, *, meanwhile):
        if self.failure is not None:
            raise self.failure
        self.compute_bytes, self.n_cut_layers = n_bytes, 2
        meanwhile()


@pytest.fixture
def told():
    """A region, and what it has told: layouts as they come, and errors."""
    told = SimpleNamespace(layouts=[], errors=[], manager=SimpleNamespace(engine=Engine()))
    structs = SimpleNamespace(binding=abi.Binding(), rewrite=told.layouts.append)
    told.compute = SlabCompute(Proxy(), 1, told.manager, structs, told.errors.append, None)
    return told


def test_a_move_that_works(told):
    done = [0]
    told.compute._serve_move(None, 8 * KIB, done)
    assert done == [abi.FILLED]
    assert told.layouts == [8 * KIB], "once, by the move itself"
    assert told.compute._struct.compute_bytes == 8 * KIB
    assert told.compute._struct.cut_cost_bytes == 2 * CUT_LAYER_BYTES
    assert told.errors == []


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_move_that_fails(told, is_sound):
    """With work left to do before slots are used, no room counts as free: the next graph asks again."""
    told.manager.engine.failure, told.manager.engine.slots_are_sound = DeviceError("told to fail"), is_sound
    done = [0]
    told.compute._serve_move(None, 8 * KIB, done)
    assert done == [0]
    assert told.layouts == [4 * KIB]
    assert told.compute._struct.compute_bytes == (4 * KIB if is_sound else 0)
    assert told.errors == [told.manager.engine.failure]
