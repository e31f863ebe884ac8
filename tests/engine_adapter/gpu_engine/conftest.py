"""The process whose engine has two fake GPUs, one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.plugin import Plugin
from fake_ggml_gpu.process import GpuProcess, process_with_two_gpus


@pytest.fixture(scope="session")
def gpu_process(
    engine: Engine, plugin: Plugin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuProcess]:
    with process_with_two_gpus(engine, plugin, tmp_path_factory.mktemp("on_fake_gpus")) as process:
        yield process
