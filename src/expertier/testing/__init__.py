"""What an integrator tests the tiers with, without a GPU and without a model.

    fake_device.py      a device whose streams advance only when told to
    pattern_source.py   bytes that follow from where they lie
    synthetic_table.py  tables of experts that no file holds
    fake_clock.py       a clock that stands still
    FaultPlan, FaultyDevice, FaultySource: calls that fail at their N-th time

The package needs nothing beyond expertier's own dependencies, save `tier_machine`, which needs hypothesis.
"""

from __future__ import annotations

from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.testing.fake_clock import FakeClock
from expertier.testing.fake_device import FakeDevice
from expertier.testing.pattern_source import PatternSource
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.tiers.file.faulty_source import FaultySource

__all__ = [
    "FakeClock",
    "FakeDevice",
    "FaultPlan",
    "FaultyDevice",
    "FaultySource",
    "LayerShape",
    "PatternSource",
    "synthetic_table",
]
