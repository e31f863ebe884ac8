"""Which of the engine's devices the tiers are put on, and what happens without the one that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter.binding.device_lookup import open_device_lookup
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.llama_cpp.layer_tiers import open_layer_tiers
from expertier.engine_adapter.placement.engine_device import device_names, device_of, has_own_memory
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import DeviceError
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.prefill_stream import resolve_stream_tokens
from expertier.tiers.model.table import ExpertTable


def test_the_wheel_has_the_cpu(loaded_engine: LoadedEngine) -> None:
    assert device_names(loaded_engine.proxy) == ["CPU"]
    assert not has_own_memory(loaded_engine.proxy, "CPU")
    with device_of(loaded_engine.proxy, "CPU") as device:
        assert device.name == "host"


def test_a_device_that_is_not_there_is_refused_with_those_that_are(loaded_engine: LoadedEngine) -> None:
    with pytest.raises(DeviceError, match=r"asked for device 'CUDA0': this engine has CPU"):
        has_own_memory(loaded_engine.proxy, "CUDA0")


def test_tiers_are_made_on_the_device_of_the_config(loaded_engine: LoadedEngine, tmp_path: Path) -> None:
    table = ExpertTable.from_gguf(write_small_model(tmp_path, "Q8_0"))
    tiers, placement = open_layer_tiers(loaded_engine.proxy, table, TierConfig())
    with tiers:
        assert placement == Placement.on_one("CPU")
        (manager,) = tiers.managers
        assert resolve_stream_tokens(manager.config, manager.device) == 0, (
            "staging costs RAM and saves nothing there"
        )
    with pytest.raises(DeviceError, match="ROCm3"):
        open_layer_tiers(loaded_engine.proxy, table, TierConfig(engine_device="ROCm3"))


@pytest.mark.parametrize(("device", "wanted"), [("CPU", False), ("CPU", "auto"), ("ROCm0", "auto")])
def test_nothing_is_logged_of_a_device_lookup_that_is_not_wanted(
    loaded_engine: LoadedEngine, device: str, wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert open_device_lookup(loaded_engine.proxy, 0, device, wanted) is None
    assert not caplog.records


@pytest.mark.parametrize("device", ["CPU", "CUDA0", "ROCm0"])
def test_a_device_lookup_that_is_wanted_and_does_not_work_says_why(
    loaded_engine: LoadedEngine, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    missing = {"EXPERTIER_CUDA_LIBRARY": "/nowhere/libcuda.so", "EXPERTIER_HIP_LIBRARY": "/nowhere/libhip.so"}
    assert open_device_lookup(loaded_engine.proxy, 0, device, True, environ=missing) is None
    (record,) = caplog.records
    assert f"event=device_lookup enabled=0 device={device} reason=" in record.getMessage()
