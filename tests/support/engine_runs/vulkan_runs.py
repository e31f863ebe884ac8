"""What the test of Vulkan does in a process of its own, whose environment chooses the device."""

from __future__ import annotations

import os
from pathlib import Path

from devices.device_parity import POOL_BYTES, compare_on
from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.open import open_engine
from expertier.engine_adapter.placement.engine_device import device_names

DEVICE = "Vulkan0"


def compare(llama_cpp: Path, path: Path, environment: dict[str, str]) -> dict[str, int] | None:
    """Compare on the first Vulkan device, with a prompt above and tokens below the width that is streamed; None without
    one. A software device takes half a second for a token."""
    os.environ.update(environment)
    engine = open_engine(llama_cpp)
    if DEVICE not in device_names(engine.proxy):
        return None
    cases = ((SMALL.experts, 0), (SMALL.experts // 2, POOL_BYTES), (SMALL.top_k, 0), (1, 0))
    return compare_on(
        engine, DEVICE, path, prompt=prompt_tokens()[:40], n_tokens=6, widths=(64, 16), cases=cases
    )
