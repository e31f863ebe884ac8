"""Run the tier machine on its devices with a fixed seed, without shrinking; exit 1 when it finds something.

`python machine_run.py EXAMPLES`
"""

from __future__ import annotations

import faulthandler
import sys

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from expertier.hip.device import Device
from expertier.testing.fake_device import FakeDevice
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.testing.tier_machine import TierMachine
from expertier.tiers.model.table import ExpertTable

HANG_S = 540  # below the limit that run.py sets
SEED = 20261129


class RoundingMachine(TierMachine):
    """Pinned memory is rounded to powers of two."""

    def make_device(self) -> Device:
        return FakeDevice(pinned_power_of_two=True)

    def make_table(self) -> ExpertTable:
        """Experts of three and of two pages."""
        return synthetic_table([LayerShape(8, n_ff=96), LayerShape(6, types=("Q4_0", "Q4_0", "Q8_0"))])


def main() -> None:
    """Run."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)  # a lost slot or block is a wait for ever
    n_examples = int(sys.argv[1])
    for machine, n in ((TierMachine, n_examples), (RoundingMachine, n_examples // 4)):
        machine._hypothesis_internal_use_seed = SEED
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=n,
                stateful_step_count=25,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )


if __name__ == "__main__":
    main()
