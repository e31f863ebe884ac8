"""The process whose engine has the devices that the environment names, one for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from fake_ggml_gpu import build_fake_gpu
from real_devices.process import LLAMA_CPP_VARIABLE, DeviceProcess, Setup, named_devices, rpc_servers


@pytest.fixture(scope="session")
def device_process(cache_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    devices, llama_cpp = named_devices(), os.environ.get(LLAMA_CPP_VARIABLE)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as servers:
        patch.setenv(CACHE_VARIABLE, cache_folder)
        is_rpc, is_fake = devices[0].startswith("RPC"), devices[0].startswith("FAKE")
        setup = Setup(
            devices=devices,
            llama_cpp=llama_cpp,
            rpc_servers=servers.enter_context(rpc_servers(llama_cpp, len(devices))) if is_rpc else (),
            fake=build_fake_gpu() if is_fake else None,
            folder=tmp_path_factory.mktemp("on_devices"),
        )
        process = DeviceProcess(setup)
        yield process
        process.close()
