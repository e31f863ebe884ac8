"""The probe's models on a device with memory of its own: the engine's rates are that device's."""

from __future__ import annotations

import pytest

from expertier.probe import engine_rates
from expertier.probe.engine_rates import measure_engine
from fake_ggml_gpu.process import GpuSession, on_fake_gpus


@pytest.mark.deep
@on_fake_gpus
def test_the_models_run_on_the_device(gpus: GpuSession) -> None:
    used = gpus.fakes.devices[1].counters()["graphs"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_GPU_STEPS": 8, "_GPU_WARM": 4, "_PROMPT": 8}.items():
            patch.setattr(engine_rates, name, value)
        patch.setattr(engine_rates, "_LAYERS", {"small": 2, "large": 2, "shallow": 1})
        patch.setattr(engine_rates, "_EXPERTS", {"small": 8, "large": 8, "shallow": 8})
        found = measure_engine(gpus.engine, lambda _: None, n_threads=1, rounds=1, device="FAKE1")
    assert gpus.fakes.devices[1].counters()["graphs"] > used
    for rate in (found.decode, found.prefill, found.pool, found.page_cache):
        assert rate.bytes_per_s > 0
        assert rate.measured
