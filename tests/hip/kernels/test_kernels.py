"""Kernels: compiled at first use and kept on disk, right on both wave sizes, and done without where they cannot be."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from devices.device_contract import random_bytes, read, rows, write
from devices.kernel_checks import BLOCK_SUMS, WARP_SIZE_ATTRIBUTE
from expertier.errors import DeviceError, DriverError
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.memory import DeviceBuffer, PinnedBuffer
from expertier.hip.driver.vendor import TRAITS, Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries
from expertier.hip.gpu.copy_choice import CopyChoice, Timing
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.moves.mover import Mover
from expertier.hip.kernels.cache import compiled, kernel_source
from expertier.hip.kernels.compiler import RuntimeCompiler
from expertier.hip.kernels.module import KernelModule

OpenFake = Callable[..., GpuDevice]


@pytest.fixture
def compiler(gpu: Gpu, fake_libraries: FakeLibraries) -> RuntimeCompiler:
    vendor = gpu.driver.vendor
    return RuntimeCompiler(vendor, load_compiler(vendor, gpu.driver.library, fake_libraries.environ()))


@pytest.mark.parametrize("wave", [32, 64])
def test_threads_of_a_block_wait_for_each_other(
    fake: FakeDriver, gpu: Gpu, compiler: RuntimeCompiler, wave: int
) -> None:
    fake.set("warp_size", wave)
    assert gpu.attribute(WARP_SIZE_ATTRIBUTE[gpu.driver.vendor]) == wave
    blocks = 5
    code = compiled(compiler, BLOCK_SUMS, gpu.architecture())
    with (
        KernelModule(gpu, code) as module,
        PinnedBuffer(gpu, blocks * 256 * 4) as source,
        PinnedBuffer(gpu, blocks * 4) as sums,
    ):
        values = source.array().view(np.uint32)
        values[:] = np.arange(len(values))
        arguments = [ctypes.c_void_p(source.device_address()), ctypes.c_void_p(sums.device_address())]
        module.function("block_sums").launch((blocks, 1), 256, arguments)
        gpu.synchronize()
        expected = values.reshape(blocks, 256).sum(axis=1) * 1000 + wave
        assert (sums.array().view(np.uint32) == expected).all()
        with pytest.raises(DriverError, match="returned 500"):
            module.function("block_sum")


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("offset", [0, 4, 3])
def test_gather_brings_experts_from_pinned_memory(
    fake: FakeDriver, open_fake: OpenFake, wave: int, offset: int
) -> None:
    fake.set("warp_size", wave)
    n, size = 70, 20_001  # more than fit into one launch's arguments
    with open_fake() as device:
        pinned, target = device.alloc_pinned(n * size), device.alloc(2 * n * size)
        content = random_bytes(n * size)
        ctypes.memmove(pinned, content, n * size)
        order = np.random.default_rng(1).permutation(n)
        moves = [
            (target + offset + 2 * i * size, pinned + int(expert) * size, size)
            for i, expert in enumerate(order)
        ]
        launches = fake.get("launches")
        device.mover.gather(np.array(moves, np.int64), 0)
        assert fake.get("launches") == launches + 2
        found = read(device, target + offset, 2 * n * size - offset)
        for i, expert in enumerate(order):
            begin = int(expert) * size
            assert found[2 * i * size : (2 * i + 1) * size] == content[begin : begin + size]
        device.free(pinned)
        device.free(target)


def test_the_way_that_was_measured_as_faster_is_taken(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        choice = device.warm_up(512 << 10)
        assert choice is not None
        assert {(timing.count, timing.n_bytes) for timing in choice.timings} >= {
            (1, 256 << 10),
            (2, 256 << 10),
        }
        assert all(timing.copies_s > 0 and timing.gather_s > 0 for timing in choice.timings)
        content = random_bytes(3 * 1000)
        pinned, target = device.alloc_pinned(3000), device.alloc(3000)
        ctypes.memmove(pinned, content, 3000)
        moves = np.array([(target + i * 1000, pinned + i * 1000, 1000) for i in range(3)] + [(target, 0, 0)])
        for gather_s, launches, copies in ((1.0, 1, 0), (3.0, 0, 3)):
            device._choice = CopyChoice([Timing(3, 1000, copies_s=2.0, gather_s=gather_s)])
            device.zero(target, 3000)
            before = fake.get("launches"), fake.get("copies_in")
            device.copy_in_many(moves)
            assert (fake.get("launches") - before[0], fake.get("copies_in") - before[1]) == (launches, copies)
            assert read(device, target, 3000) == content
        device.copy_in_many(moves[:0])
        device.free(pinned)
        device.free(target)


def test_the_nearest_measurement_decides() -> None:
    choice = CopyChoice(
        [Timing(1, 1 << 20, 1.0, 2.0), Timing(8, 1 << 20, 2.0, 1.0), Timing(8, 8 << 20, 1.0, 2.0)]
    )
    assert not choice.gather_is_faster(1, 1 << 20)
    assert choice.gather_is_faster(6, 1_200_000)
    assert not choice.gather_is_faster(24, 16 << 20)
    assert not choice.gather_is_faster(1, 1)


def test_without_a_compiler_moves_are_copies(
    fake: FakeDriver, gpu: Gpu, vendor: Vendor, caplog: pytest.LogCaptureFixture
) -> None:
    variable = TRAITS[vendor].compiler_variable
    with caplog.at_level(logging.WARNING):
        mover = Mover(gpu, environ={variable: "/nowhere.so"})
    assert not mover.kernels
    assert f"no kernels ({variable}='/nowhere.so' cannot be loaded" in caplog.text
    with DeviceBuffer(gpu, 8192) as memory:
        memory.zero()
        mover.move(rows([(0, 4096, 4096), (5000, 0, 100)], memory.address), 0)
        gpu.synchronize()
    assert fake.get("launches") == 0
    assert fake.get("copies_within") == 2
    mover.close()


def test_zeros_in_many_places_are_one_launch(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        block = device.alloc(1 << 20)
        pieces = np.stack([block + np.arange(200) * 4096, np.full(200, 512)], axis=1)
        before = fake.get("launches")
        device.zero_all(pieces)
        assert fake.get("launches") == before + 1
        device.free(block)


def test_scratch_is_not_shared_between_streams_at_once(fake: FakeDriver, open_fake: OpenFake) -> None:
    size = 300_000
    with open_fake() as device:
        fake.set("jitter_us", 3000)
        streams = [device.create_stream() for _ in range(3)]
        blocks = [device.alloc(size) for _ in streams]
        for i, block in enumerate(blocks):
            write(device, block, random_bytes(size, i))
        for _ in range(3):
            for stream, block in zip(streams, blocks, strict=True):
                device.copy_within(rows([(1, 0, size - 1)], block), stream)
        for i, block in enumerate(blocks):
            content = random_bytes(size, i)
            assert read(device, block, size)[3:] == content[: size - 3]
            device.free(block)


def test_tables_are_not_written_while_they_are_read(fake: FakeDriver, open_fake: OpenFake) -> None:
    n, size = 100, 64
    with open_fake() as device:
        fake.set("jitter_us", 2000)
        block, stream = device.alloc(16 * n * size), device.create_stream()
        content = random_bytes(n * size)
        write(device, block, content)
        for step in range(8):
            moves = [((step + 1) * n * size + i * size, step * n * size + i * size, size) for i in range(n)]
            device.copy_within(rows(moves, block), stream)
        assert read(device, block + 8 * n * size, n * size) == content
        device.free(block)


def test_an_event_that_cannot_be_recorded_is_waited_for(
    fake: FakeDriver, open_fake: OpenFake, vendor: Vendor, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would know when the table is free: so it is, when the call returns."""
    with open_fake() as device:
        block, stream = device.alloc(1 << 20), device.create_stream()
        fake.set("jitter_us", 20_000)
        fake.fail({Vendor.HIP: "hipEventRecord", Vendor.CUDA: "cuEventRecord"}[vendor], 1, 999)
        device.copy_within(rows([(500_000 + i * 100, i * 100, 100) for i in range(80)], block), stream)
        assert device.gpu.ask("stream_query", stream)
        assert "waiting for the stream instead" in caplog.text
        device.free(block)


def test_kernels_are_kept_on_disk(
    compiler: RuntimeCompiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path))
    compiles: list[str] = []

    def counted(_: RuntimeCompiler, source: str, architecture: str) -> bytes:
        compiles.append(architecture)
        return f"{source} for {architecture}".encode()

    monkeypatch.setattr(RuntimeCompiler, "compile", counted)
    source = 'extern "C" __global__ void nothing(int* p) { *p = 1; }'
    code = compiled(compiler, source, "one")
    assert compiled(compiler, source, "one") == code
    assert compiles == ["one"]
    compiled(compiler, source, "two")
    compiled(compiler, source + "\n", "one")
    assert compiles == ["one", "two", "one"]
    files = sorted((tmp_path / "kernels").glob("*-one-*.bin"))
    assert len(files) == 2
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert compiled(compiler, source, "one") == code
    assert "is damaged; compiling again" in caplog.text
    assert len(compiles) == 4


def test_a_cache_folder_that_cannot_be_used(
    compiler: RuntimeCompiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert compiled(compiler, BLOCK_SUMS, "any")
    assert "compiled kernels cannot be kept" in caplog.text


@pytest.mark.parametrize("what", ["root", "kernels", "file"])
def test_kernels_that_others_could_have_planted(
    compiler: RuntimeCompiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    """They are compiled anew, and a warning says why."""
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(RuntimeCompiler, "compile", lambda *_: b"ours")
    assert compiled(compiler, "source", "any") == b"ours"
    (kept,) = (tmp_path / "kernels").glob("*.bin")
    kept.write_bytes(hashlib.sha256(b"theirs").digest() + b"theirs")
    place = {"root": tmp_path, "kernels": kept.parent, "file": kept}[what]
    place.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert compiled(compiler, "source", "any") == b"ours"
    assert f"from {place}: every user can write to it" in caplog.text


def test_a_source_with_an_error(compiler: RuntimeCompiler) -> None:
    with pytest.raises(
        DeviceError, match=r"(hiprtc|nvrtc)CompileProgram for any returned 6 .*COMPILATION(.|\n)*nonsense"
    ):
        compiler.compile('extern "C" __global__ void broken() { nonsense }', "any")


def test_code_that_is_none(gpu: Gpu) -> None:
    with pytest.raises(DriverError, match="returned 200"):
        KernelModule(gpu, b"no machine code")


def test_a_compiler_that_is_none(vendor: Vendor) -> None:
    with pytest.raises(DeviceError, match=r"it is no (hip|cuda) runtime compiler"):
        RuntimeCompiler(vendor, ctypes.CDLL("libm.so.6"))


def test_the_source_includes_nothing() -> None:
    assert "#include" not in kernel_source("moves.cu")
