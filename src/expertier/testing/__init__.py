"""Tools with which an integrator tests the tiers, without a GPU and without a model.

    fake_device.py      a device whose streams advance only when told to
    pattern_source.py   a source whose bytes are computed from their offsets
    synthetic_table.py  tables of experts that exist in no file
    fake_clock.py       a clock that only a test moves
    unlocked_calls.py   the policy's calls, without the layer's lock
    tier_machine/       the tiers under random use and faults (needs hypothesis)
    FaultPlan, FaultyDevice, FaultySource: calls whose N-th use fails

Only `tier_machine` needs a package, hypothesis, beyond expertier's own dependencies.
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
