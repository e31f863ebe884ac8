"""The tiers under random use and faults, on the fake device with its streams and on the host device.

The machine is `expertier.testing.tier_machine`, the one that integrators run on devices and engines of their own.
With the `deep` profile it runs 20,000 examples on the fake device, and a quarter of that on each of the others.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from expertier.hip.device import Device
from expertier.hip.host import HostDevice
from expertier.testing.fake_device import FakeDevice
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.testing.tier_machine import TierMachine
from expertier.tiers.model.table import ExpertTable

HANG_S = 600


def profile(shallow_examples: int, deep_examples: int) -> settings:
    """So many examples, more with the `deep` profile. Steps are few, so that there may be that many."""
    is_deep = settings().max_examples > 1000
    return settings(
        max_examples=deep_examples if is_deep else shallow_examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def _no_wait_for_ever() -> Iterator[None]:
    """A slot or a block that was lost shows as a wait that nobody ends: say where."""
    faulthandler.dump_traceback_later(12 * HANG_S if settings().max_examples > 1000 else HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class HostMachine(TierMachine):
    """Without streams: copies are complete when calls return."""

    def make_device(self) -> Device:
        return HostDevice()


class RoundingMachine(TierMachine):
    """Pinned memory is rounded to powers of two, as ROCm's driver does."""

    def make_device(self) -> Device:
        return FakeDevice(pinned_power_of_two=True)

    def make_table(self) -> ExpertTable:
        """Experts of three and of two pages."""
        return synthetic_table([LayerShape(8, n_ff=96), LayerShape(6, types=("Q4_0", "Q4_0", "Q8_0"))])


TestOnFakeDevice = TierMachine.TestCase
TestOnFakeDevice.settings = profile(80, 20_000)
TestOnHostDevice = HostMachine.TestCase
TestOnHostDevice.settings = profile(60, 5_000)
TestWithRoundedPinnedMemory = RoundingMachine.TestCase
TestWithRoundedPinnedMemory.settings = profile(30, 5_000)
