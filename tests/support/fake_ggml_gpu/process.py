"""Tests in a process of their own, whose engine has the fake devices (`engine_process`).

    @on_fake_gpus
    def test_something(gpus: GpuSession, n_slots): ...

The fixture `gpu_process` of the folder's conftest is where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_runs.engine_process import EngineProcess, in_process
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.plugin import Plugin
from expertier.engine_adapter.llama_cpp import LoadedEngine
from fake_ggml_gpu.library import FakeGpus, build_fake_gpu


@dataclass(frozen=True)
class Setup:
    """What the process loads, and how many devices it has."""

    libraries: Sequence[Path]
    proxy: Path
    host: Path
    fake: Path
    n_devices: int
    folder: Path
    """For files that tests make and share."""


@dataclass(frozen=True)
class GpuSession:
    """The engine with its fake devices, inside of that process."""

    engine: LoadedEngine
    fakes: FakeGpus
    folder: Path

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Reset the devices before and after the block; it must leave no fault and no memory, stream or event."""
        self.fakes.reset()
        self.fakes.take_faults()
        before = [device.live() for device in self.fakes.devices]
        try:
            yield
        finally:
            self.fakes.reset()
        faults = self.fakes.take_faults()
        assert not faults, f"the devices complained:\n{faults}"
        after = [device.live() for device in self.fakes.devices]
        assert after == before, f"left on the devices: {after}, before: {before}"


class GpuProcess(EngineProcess[Setup]):
    """The process, seen from outside."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(
            start, setup, "something touched device memory by its address, an assertion of the engine failed"
        )


@contextmanager
def process_with_two_gpus(engine: Engine, plugin: Plugin, folder: Path) -> Iterator[GpuProcess]:
    """A process whose engine has two fake GPUs; `folder` is for files that its tests make and share."""
    setup = Setup(
        libraries=engine.libraries,
        proxy=plugin.proxy_path,
        host=plugin.host_path,
        fake=build_fake_gpu(),
        n_devices=2,
        folder=folder,
    )
    process = GpuProcess(setup)
    try:
        yield process
    finally:
        process.close()


def on_fake_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the process of the fake devices; its first parameter, `gpus`, is a GpuSession."""
    return in_process("gpu_process")(test)


def start(setup: Setup) -> GpuSession:
    """Load the engine and give it the devices."""
    engine = LoadedEngine.load(setup.libraries, setup.proxy, setup.host)
    fakes = FakeGpus.load(engine, setup.fake, n_devices=setup.n_devices)
    return GpuSession(engine, fakes, setup.folder)
