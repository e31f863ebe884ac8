"""The process whose engine has the named devices, and what it takes to run a test there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_runs.engine_process import EngineProcess, in_process
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.open import open_engine
from expertier.engine_adapter.placement.engine_device import device_of
from fake_ggml_gpu.library import FakeGpus
from limits.waits import wait_until_listening

DEVICES_VARIABLE = "EXPERTIER_TEST_DEVICES"
LLAMA_CPP_VARIABLE = "EXPERTIER_TEST_LLAMA_CPP"
_PATIENCE_S = 30


@dataclass(frozen=True)
class Setup:
    """What the process loads."""

    devices: tuple[str, ...]
    llama_cpp: str | None
    rpc_servers: tuple[str, ...]
    fake: Path | None
    folder: Path
    """For files that tests make and share."""


@dataclass(frozen=True)
class DeviceSession:
    """The engine with the named devices, inside of that process."""

    engine: LoadedEngine
    devices: tuple[str, ...]
    fakes: FakeGpus | None
    folder: Path

    @property
    def kind(self) -> str:
        """What the devices' names have in common: `CUDA`, `RPC`, `FAKE`."""
        return re.sub(r"\d+$", "", self.devices[0])

    @property
    def reports_own_memory(self) -> bool:
        """Whether a device's free memory is its own: servers on this machine report all of its RAM."""
        return self.kind != "RPC"

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Have what the fake devices complain of fail the test; real ones end the process."""
        if self.fakes is not None:
            self.fakes.reset()
            self.fakes.take_faults()
        try:
            yield
        finally:
            if self.fakes is not None:
                self.fakes.reset()
        faults = self.fakes.take_faults() if self.fakes is not None else ""
        assert not faults, f"the devices complained:\n{faults}"


class DeviceProcess(EngineProcess[Setup]):
    """The process, seen from outside."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(start, setup, "the driver found a fault, or an assertion of the engine failed")


def on_devices(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the process of the named devices; its first parameter is a DeviceSession."""
    return in_process("device_process")(test)


def named_devices() -> tuple[str, ...]:
    """Return the devices that EXPERTIER_TEST_DEVICES names, or skip."""
    names = os.environ.get(DEVICES_VARIABLE, "")
    if not names:
        pytest.skip(
            f"{DEVICES_VARIABLE} names no devices: give such as CUDA0,CUDA1, and {LLAMA_CPP_VARIABLE}=DIR of a "
            "llama.cpp build that has them"
        )
    return tuple(names.split(","))


@contextmanager
def rpc_servers(llama_cpp: str | None, n: int) -> Iterator[tuple[str, ...]]:
    """Start `n` servers of that build on this machine; yields where they listen."""
    tool = Path(llama_cpp or "") / "build" / "bin" / "ggml-rpc-server"
    assert llama_cpp is not None, f"{LLAMA_CPP_VARIABLE} names no build that has RPC servers"
    assert tool.exists(), f"no {tool}: build that llama.cpp with -DGGML_RPC=ON"
    with ExitStack() as ending:
        yield tuple(_start_server(tool, ending) for _ in range(n))


def start(setup: Setup) -> DeviceSession:
    """Load the engine and see that it has the devices."""
    engine = open_engine(setup.llama_cpp, rpc_servers=setup.rpc_servers)
    fakes = None
    if setup.fake is not None:
        fakes = FakeGpus.load(engine, setup.fake, n_devices=len(setup.devices))
    for name in setup.devices:
        assert device_of(engine.proxy, name).has_own_memory, f"{name} has no memory of its own"
    return DeviceSession(engine, setup.devices, fakes, setup.folder)


def _start_server(tool: Path, ending: ExitStack) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [tool, "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    ending.callback(process.wait, _PATIENCE_S)
    ending.callback(process.kill)
    wait_until_listening(process, port)
    return f"127.0.0.1:{port}"
