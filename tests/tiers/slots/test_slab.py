"""The slab: ranges from the high end, a compute region below, experts that stay, zeros, and calls that fail."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError, DeviceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.planner.policy.repack import NOT_IN_LINE, Survivors
from expertier.tiers.model.slot_layout import GUARD_BYTES, SlotLayout
from expertier.tiers.slots.slab import Slab
from expertier.tiers.slots.survivors import in_place
from model_files.gguf_files import Block, ModelFile, write_model

N_EXPERTS = 8
SLAB_BYTES = 100_001


@cache
def _layouts(folder: str) -> tuple[SlotLayout, ...]:
    from pathlib import Path

    blocks = [Block(), Block(types=("Q4_0", "Q4_0", "Q8_0")), Block(n_experts=4)]
    model: ModelFile = write_model(Path(folder) / "m.gguf", blocks)
    return model.table.slot_layouts


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[SlotLayout, ...]:
    """Slots in one piece, slots of arrays, and a layer of few experts."""
    return _layouts(str(tmp_path_factory.mktemp("model")))


def laid_out(layouts: Sequence[SlotLayout], slots: Sequence[int], compute_bytes: int = 0) -> Slab:
    slab = Slab(HostDevice(), layouts, SLAB_BYTES)
    slab.relayout(slab.plan(slots, compute_bytes), Survivors.none())
    return slab


def test_ranges_are_stacked_from_the_high_end(layouts: tuple[SlotLayout, ...]) -> None:
    device = HostDevice()
    slab = Slab(device, layouts, SLAB_BYTES)
    assert slab.n_bytes == 100_096
    slab.relayout(slab.plan([2, 3, 1], 1000), Survivors.none())
    slab.check_valid()
    layout = slab.layout
    assert layout.used_bytes == sum(layer.range_bytes(n) for layer, n in zip(layouts, [2, 3, 1], strict=True))
    assert layout.compute_bytes == 1024
    assert layout.used_bytes + layout.compute_bytes + layout.rounding_bytes == slab.n_bytes
    assert slab.places(0)[0].offset == slab.n_bytes - layout.used_bytes
    last = slab.places(2)
    assert slab.n_bytes - (last[0].offset + layouts[2].slot_bytes) >= GUARD_BYTES
    slab.close()
    slab.close()
    device.close()


def test_what_does_not_fit_is_refused(layouts: tuple[SlotLayout, ...]) -> None:
    slab = laid_out(layouts, [2, 2, 1])
    with pytest.raises(BudgetError, match="plan for the manager's arena_bytes"):
        slab.plan([40, 8, 4], 0)
    with pytest.raises(BudgetError, match=r"of which 0\.086 are for computing"):
        slab.plan([2, 2, 1], 90_000)
    for slots in ([1, 1], [1, 0, 1]):
        with pytest.raises(ValueError, match="need a slot each"):
            slab.plan(slots, 0)
    assert slab.slots == (2, 2, 1)
    slab.check_valid()


def test_copies_lie_within_the_layer(layouts: tuple[SlotLayout, ...]) -> None:
    slab = laid_out(layouts, [3, 3, 3])
    for layer, layout in enumerate(layouts):
        begin = slab.base + slab.places(layer)[0].offset
        seen = set()
        for slot in range(3):
            for address, source, n_bytes in slab.fills(layer, [slot], [0]).tolist():
                assert begin <= address
                assert address + n_bytes <= begin + layout.range_bytes(3)
                assert source + n_bytes <= layout.block_bytes
                seen.add(address)
        assert len(seen) == 3 * len(slab.fills(layer, [0], [0]).tolist())


# ---- experts that stay


def pattern(layer: int, expert: int, piece: int, n_bytes: int) -> bytes:
    rng = np.random.default_rng([layer, expert, piece])
    return rng.integers(1, 256, n_bytes, np.uint8).tobytes()


def put(slab: Slab, layer: int, expert: int, slot: int) -> None:
    for piece, (address, _, n_bytes) in enumerate(slab.fills(layer, [slot], [0]).tolist()):
        ctypes.memmove(address, pattern(layer, expert, piece, n_bytes), n_bytes)


def is_there(slab: Slab, layer: int, expert: int, slot: int) -> bool:
    return all(
        ctypes.string_at(address, n_bytes) == pattern(layer, expert, piece, n_bytes)
        for piece, (address, _, n_bytes) in enumerate(slab.fills(layer, [slot], [0]).tolist())
    )


def guards_are_zero(slab: Slab, survivors: Survivors) -> bool:
    return all(
        not any(ctypes.string_at(slab.base + offset, n_bytes))
        for offset, n_bytes in slab.layout.guards(survivors.layer, survivors.new_slot).tolist()
    )


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[int], int, list[int], int, Survivors]:
    """Two layouts that fit, and experts that keep their order in both."""
    sides = [[draw(st.integers(1, 6)) for _ in range(3)] for _ in range(2)]
    compute = [draw(st.sampled_from([0, 0, 100, 3000, 20_000])) for _ in range(2)]
    rows: list[tuple[int, int, int, int]] = []
    for layer in range(3):
        n_old, n_new = sides[0][layer], sides[1][layer]
        n_kept = draw(st.integers(0, min(n_old, n_new)))
        olds = sorted(draw(st.permutations(range(n_old)))[:n_kept])
        news = sorted(draw(st.permutations(range(n_new)))[:n_kept])
        experts = draw(st.permutations(range(N_EXPERTS)))
        rows += [(layer, expert, old, new) for expert, old, new in zip(experts, olds, news, strict=False)]
    columns = np.array(rows, np.int32).reshape(-1, 4).T.copy()
    return sides[0], compute[0], sides[1], compute[1], Survivors(*columns)


def before_the_move(
    device: HostDevice | FaultyDevice,
    layouts: Sequence[SlotLayout],
    old: list[int],
    compute: int,
    survivors: Survivors,
) -> Slab:
    slab = Slab(device, layouts, SLAB_BYTES)
    ctypes.memset(slab.base, 0xA5, slab.n_bytes)  # as if everything had been used
    slab.relayout(slab.plan(old, compute), Survivors.none())
    slab.relayout(slab.plan(old, compute), Survivors.none())
    for layer, expert, slot in zip(
        *(a.tolist() for a in (survivors.layer, survivors.expert, survivors.old_slot)), strict=True
    ):
        put(slab, layer, expert, slot)
    return slab


@given(moves())
def test_experts_that_stay_have_their_bytes_after_every_move(
    tmp_path_factory: pytest.TempPathFactory, move: tuple[list[int], int, list[int], int, Survivors]
) -> None:
    old, old_compute, new, new_compute, survivors = move
    slab = before_the_move(HostDevice(), _layouts(_folder(tmp_path_factory)), old, old_compute, survivors)
    slab.relayout(slab.plan(new, new_compute), survivors)
    for row in range(len(survivors.layer)):
        assert is_there(
            slab, int(survivors.layer[row]), int(survivors.expert[row]), int(survivors.new_slot[row])
        )
    assert guards_are_zero(slab, survivors)
    assert slab.slots == tuple(new)

    slab.check_valid()


@given(moves(), st.sampled_from(["copy_within", "zero"]), st.integers(1, 12))
def test_a_failed_move_says_what_is_intact(
    tmp_path_factory: pytest.TempPathFactory,
    move: tuple[list[int], int, list[int], int, Survivors],
    operation: str,
    nth: int,
) -> None:
    old, old_compute, new, new_compute, survivors = move
    faults = FaultPlan()
    device = FaultyDevice(HostDevice(), faults)
    slab = before_the_move(device, _layouts(_folder(tmp_path_factory)), old, old_compute, survivors)
    target = slab.plan(new, new_compute)
    faults.arm(operation, nth)
    try:
        slab.relayout(target, survivors)
    except DeviceError:
        assert slab.slots == tuple(old)
        assert slab.stale_guards
    else:
        return
    intact = in_place(slab.still_there(target, survivors))
    for row in range(len(intact.layer)):
        assert is_there(slab, int(intact.layer[row]), int(intact.expert[row]), int(intact.old_slot[row]))
    faults.arm("zero", 1)
    with pytest.raises(DeviceError):
        slab.restore_guards(intact)
    slab.restore_guards(intact)
    assert not slab.stale_guards
    assert guards_are_zero(slab, intact)
    for row in range(len(intact.layer)):
        assert is_there(slab, int(intact.layer[row]), int(intact.expert[row]), int(intact.old_slot[row]))


def test_slots_that_line_up_are_known(layouts: tuple[SlotLayout, ...]) -> None:
    slab = laid_out(layouts, [4, 4, 4])
    same = slab.layout
    assert same.shifts_to(same).tolist() == [0, 0, 0]
    fewer = slab.plan([4, 4, 2], 0)
    shift = int(same.shifts_to(fewer)[2])
    if shift != NOT_IN_LINE:
        before, after = (slab.layout.places(2), 2 + shift), (fewer.places(2), 2)
        rows = [layouts[2].fills(places, [slot], [0], 0).tolist() for places, slot in (before, after)]
        assert rows[0] == rows[1]


_FOLDERS: list[str] = []


def _folder(factory: pytest.TempPathFactory) -> str:
    if not _FOLDERS:
        _FOLDERS.append(str(factory.mktemp("layouts")))
    return _FOLDERS[0]
