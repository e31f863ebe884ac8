"""Runs one scenario on the real llama-cpp-python; the last line of the output is a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_runs.drop_in.failures import failed_reads, interrupted
from engine_runs.drop_in.lifetimes import freed, left_open
from engine_runs.drop_in.parity import parity, two_models
from engine_runs.drop_in.refusals import errors
from engine_runs.drop_in.states import states

SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (parity, two_models, states, failed_reads, interrupted, freed, left_open, errors)
}

if __name__ == "__main__":
    name, folder, options = sys.argv[1:]
    print(json.dumps(SCENARIOS[name](Path(folder), **json.loads(options))))
