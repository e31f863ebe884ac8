"""The tiers under random use and faults, as a Hypothesis state machine. Needs hypothesis (`expertier[testing]`).

    class TestMyDevice(TierMachine.TestCase): ...      # as it is: the tiers on a `FakeDevice`

Subclass `TierMachine` and override what `hooks.py` lists to test a device or an engine of your own. Rules use
the tiers the way threads, engines and queued kernels do, and fail calls of the device and the source; after each
step all invariants are checked.

    hooks.py         the methods that an integrator overrides
    base.py          the state and the steps that the rules share; model.py: the classes of the state
    leases.py, engine.py, boundary.py, prefetches.py    the rules
    checks.py        the invariants that are checked after every step
    watched.py       the device and the source, whose calls can fail
    engine_calls.py  an engine's calls of the tiers
    inside.py        the only file that reads the manager's private state
"""

from __future__ import annotations

from expertier.testing.tier_machine.boundary import BoundaryRules
from expertier.testing.tier_machine.checks import TierChecks
from expertier.testing.tier_machine.engine import EngineRules
from expertier.testing.tier_machine.engine_calls import EngineCalls, TableEngine
from expertier.testing.tier_machine.hooks import Read, Seen, TierHooks
from expertier.testing.tier_machine.leases import LeaseRules
from expertier.testing.tier_machine.model import Fault
from expertier.testing.tier_machine.prefetches import PrefetchRules

__all__ = ["EngineCalls", "Fault", "Read", "Seen", "TableEngine", "TierHooks", "TierMachine"]


class TierMachine(BoundaryRules, LeaseRules, EngineRules, PrefetchRules, TierChecks):
    """One manager under random use: run its `TestCase`."""
