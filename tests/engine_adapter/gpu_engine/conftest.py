"""The process whose engine has two fake GPUs, one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.plugin import Plugin
from fake_ggml_gpu import build_fake_gpu
from fake_ggml_gpu.process import GpuProcess, Setup


@pytest.fixture(scope="session")
def gpu_process(
    engine: Engine, plugin: Plugin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuProcess]:
    setup = Setup(
        libraries=engine.libraries,
        proxy=plugin.proxy_path,
        host=plugin.host_path,
        fake=build_fake_gpu(),
        n_devices=2,
        folder=tmp_path_factory.mktemp("on_fake_gpus"),
    )
    process = GpuProcess(setup)
    yield process
    process.close()
