"""What the tier machine says about tiers, devices and engines that are wrong: each of these must be found.

The planted bugs of `make test-mutants` are in the package; these are on the integrator's side of the hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from expertier.hip.device import Device
from expertier.testing import FakeDevice
from expertier.testing.tier_machine import EngineCalls, Read, Seen, TableEngine, TierMachine
from expertier.tiers.manager import TierManager

I32 = npt.NDArray[np.int32]


def find_bug(machine: type[TierMachine], n_examples: int = 400) -> None:
    """Run a machine with a fixed seed."""
    machine._hypothesis_internal_use_seed = 5  # type: ignore[attr-defined]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=25,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


class DeafDevice(FakeDevice):
    """Forgets to wait for events."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        pass


class LeakyDevice(FakeDevice):
    """Says that memory is pinned that it does not count."""

    @property
    def pinned_bytes(self) -> int:
        return super().pinned_bytes // 2


class GreedyEngine(TableEngine):
    """Declares its misses complete before they are."""

    def fill(self, layer: int, experts: I32, slots: I32) -> None:
        pass


class ForgetfulEngine(TableEngine):
    """Does not release all of its slots."""

    def release(self, layer: int, slots: I32) -> None:
        super().release(layer, slots[1:])


def machine_on(device: type[FakeDevice]) -> type[TierMachine]:
    class Machine(TierMachine):
        def make_device(self) -> Device:
            return device()

    return Machine


def machine_with(engine: type[TableEngine]) -> type[TierMachine]:
    class Machine(TierMachine):
        def open_engine(self, tiers: TierManager) -> EngineCalls:
            return engine(tiers)

    return Machine


@pytest.mark.parametrize("device", [DeafDevice, LeakyDevice])
def test_a_wrong_device_is_found(device: type[FakeDevice]) -> None:
    with pytest.raises(BaseException, match=r"I\d|wrong from byte|Exceptions|sub-exception"):
        find_bug(machine_on(device))


@pytest.mark.parametrize("engine", [pytest.param(GreedyEngine, marks=pytest.mark.deep), ForgetfulEngine])
def test_a_wrong_engine_is_found(engine: type[TableEngine]) -> None:
    with pytest.raises(BaseException, match=r"I\d|wrong from byte|Exceptions|sub-exception|still holds"):
        find_bug(machine_with(engine))


def test_every_hook_is_used() -> None:
    seen: set[str] = set()

    class Machine(TierMachine):
        def launch_read(self, stream: int | None, reads: Sequence[Read], tell: Seen) -> None:
            seen.add("launch_read")
            super().launch_read(stream, reads, tell)

        def launch_write(self, stream: int | None, address: int, n_bytes: int, value: int) -> None:
            seen.add("launch_write")
            super().launch_write(stream, address, n_bytes, value)

        def read_memory(self, address: int, n_bytes: int) -> bytes:
            seen.add("read_memory")
            return super().read_memory(address, n_bytes)

        def write_memory(self, address: int, n_bytes: int, value: int) -> None:
            seen.add("write_memory")
            super().write_memory(address, n_bytes, value)

        def advance(self, stream: int, n: int) -> None:
            seen.add("advance")
            super().advance(stream, n)

        def open_engine(self, tiers: TierManager) -> EngineCalls:
            seen.add("open_engine")
            return super().open_engine(tiers)

    find_bug(Machine, 60)
    assert seen == {"launch_read", "launch_write", "read_memory", "write_memory", "advance", "open_engine"}
