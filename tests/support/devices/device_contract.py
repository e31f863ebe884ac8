"""What every device must do, whatever it is made of: `tests/hip` runs it on the host and on the fake drivers,
`tests/gpu` on a real GPU.

A test module subclasses `DeviceContract` and has a fixture `device` that gives an open device.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np
import pytest

from expertier.errors import DeviceError
from expertier.hip import Device
from expertier.hip.fence import Fences
from expertier.hip.zeros import zero_pieces

PAGE = mmap.PAGESIZE


def write(device: Device, target: int, content: bytes, stream: int = 0) -> None:
    """Bring bytes into device memory; done when it returns."""
    staging = device.alloc_pinned(max(1, len(content)))
    ctypes.memmove(staging, content, len(content))
    device.copy_in(target, staging, len(content), stream)
    device.synchronize()
    device.free(staging)


def read(device: Device, source: int, n_bytes: int) -> bytes:
    """Return bytes of device memory, after all work."""
    device.synchronize()
    staging = device.alloc_pinned(max(1, n_bytes))
    device.copy_out(staging, source, n_bytes)
    device.synchronize()
    content = ctypes.string_at(staging, n_bytes)
    device.free(staging)
    return content


def moved(content: bytes, moves: list[tuple[int, int, int]]) -> bytes:
    """Return what `content` is after moves of (target, source, bytes), one after another."""
    memory = bytearray(content)
    for target, source, n_bytes in moves:
        memory[target : target + n_bytes] = bytes(memory[source : source + n_bytes])
    return bytes(memory)


def rows(moves: list[tuple[int, int, int]], base: int) -> np.ndarray:
    """Return moves within a block at `base` as a device takes them."""
    return np.array([(base + t, base + s, n) for t, s, n in moves], np.int64).reshape(-1, 3)


def random_bytes(n_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that differ from place to place."""
    return np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8).tobytes()


class DeviceContract:
    """The tests. None of them looks at device memory but through copies."""

    def test_it_is_a_device(self, device: Device) -> None:
        assert isinstance(device, Device)
        assert device.name
        assert device.device_bytes == device.pinned_bytes == 0
        assert device.free_bytes() > 0

    @pytest.mark.parametrize("n_bytes", [1, 5000, 3 << 20])
    def test_device_memory_is_zero_aligned_and_counted(self, device: Device, n_bytes: int) -> None:
        address = device.alloc(n_bytes)
        assert address % PAGE == 0
        assert device.device_bytes == device.allocation_bytes(n_bytes) >= n_bytes
        assert read(device, address, n_bytes) == bytes(n_bytes)
        device.free(address)
        assert device.device_bytes == 0

    def test_memory_is_zero_again_where_it_was_used_before(self, device: Device) -> None:
        for _ in range(2):
            address = device.alloc(1 << 20)
            assert read(device, address, 1 << 20) == bytes(1 << 20)
            write(device, address, b"\xff" * (1 << 20))
            device.free(address)

    def test_pinned_memory_is_aligned_and_counted(self, device: Device) -> None:
        taken = [device.alloc_pinned(n_bytes) for n_bytes in (1, PAGE, 5000)]
        assert all(address % PAGE == 0 for address in taken)
        expected = sum(device.pinned_allocation_bytes(n_bytes) for n_bytes in (1, PAGE, 5000))
        assert device.pinned_bytes == expected
        for address in taken:
            ctypes.memset(address, 1, 1)
            device.free(address)
        assert device.pinned_bytes == 0

    def test_free_bytes_fall_and_return(self, device: Device) -> None:
        if not device.has_streams:
            pytest.skip("a host's free memory falls when pages are touched")
        before = device.free_bytes()
        address = device.alloc(64 << 20)
        assert device.free_bytes() <= before - (64 << 20)
        device.free(address)
        assert device.free_bytes() > before - (8 << 20)

    @pytest.mark.parametrize("n_bytes", [0, 1, 4097, 1 << 20])
    def test_what_is_copied_in_comes_out(self, device: Device, n_bytes: int) -> None:
        content = random_bytes(n_bytes)
        address = device.alloc((1 << 20) + 7)
        write(device, address + 7, content)
        assert read(device, address, 7) == bytes(7)
        assert read(device, address + 7, n_bytes) == content
        device.free(address)

    @pytest.mark.parametrize("n_bytes", [3, 5000, 2 * PAGE])
    def test_zero_clears_what_it_says_and_no_more(self, device: Device, n_bytes: int) -> None:
        address = device.alloc(4 * PAGE)
        write(device, address, b"\x09" * (4 * PAGE))
        device.zero(address, n_bytes)
        assert read(device, address, 4 * PAGE) == bytes(n_bytes) + b"\x09" * (4 * PAGE - n_bytes)
        device.free(address)

    @pytest.mark.parametrize("n_pieces", [0, 1, 40, 300])
    def test_many_pieces_are_cleared_and_no_more(self, device: Device, n_pieces: int) -> None:
        rng = np.random.default_rng(n_pieces)
        content = random_bytes(1 << 20)
        address = device.alloc(len(content))
        write(device, address, content)
        pieces = np.stack(
            [rng.integers(0, (1 << 20) - 10_000, n_pieces), rng.integers(0, 700, n_pieces)], axis=1
        ).astype(np.int64)
        pieces[: n_pieces // 10, 1] = 9001  # and a few that are longer
        zero_pieces(device, pieces + np.array([address, 0]))
        expected = bytearray(content)
        for begin, n_bytes in pieces.tolist():
            expected[begin : begin + n_bytes] = bytes(n_bytes)
        assert read(device, address, len(content)) == expected
        device.free(address)

    @pytest.mark.parametrize(
        "moves",
        [
            [],
            [(0, 5000, 0)],
            [(5, 5, 100)],
            [(0, 4096, 4096)],
            [(1, 4098, 777)],
            [(8008, 8, 5)],  # ends before the first whole vector
            [(2, 4098, 776), (8192, 0, 16)],
            # a swap through a third place, and a chain
            [(9000, 0, 500), (0, 500, 500), (500, 9000, 500)],
            [(3000, 2000, 1000), (2000, 1000, 1000), (1000, 0, 1000)],
            # overlapping itself, both ways, by little and by much
            [(1, 0, 9000)],
            [(0, 1, 9000)],
            [(2048, 0, 9000)],
            [(0, 2048, 9000)],
            # the same source twice, the same target twice
            [(8000, 0, 100), (8100, 0, 100)],
            [(8000, 0, 100), (8050, 200, 100)],
        ],
        ids=repr,
    )
    def test_moves_are_as_if_one_after_another(
        self, device: Device, moves: list[tuple[int, int, int]]
    ) -> None:
        content = random_bytes(12_000)
        address = device.alloc(len(content))
        write(device, address, content)
        device.copy_within(rows(moves, address))
        assert read(device, address, len(content)) == moved(content, moves)
        device.free(address)

    @pytest.mark.parametrize("slot", [4096, 1536, 1000, 999])
    def test_a_boundary_move(self, device: Device, slot: int) -> None:
        n = 300
        content = random_bytes(n * slot)
        address = device.alloc(len(content))
        write(device, address, content)
        kept = [i for i in range(n) if i * 7 % 3][::-1]
        moves = [((n - 1 - place) * slot, i * slot, slot) for place, i in enumerate(kept)]
        device.copy_within(rows(moves, address))
        assert read(device, address, len(content)) == moved(content, moves)
        device.free(address)

    def test_streams_keep_their_order(self, device: Device, new_stream: Callable[[], int]) -> None:
        stream = new_stream()
        content = random_bytes(1 << 20)
        address, staging = device.alloc(2 << 20), device.alloc_pinned(2 << 20)
        ctypes.memmove(staging, content, len(content))
        device.copy_in(address, staging, 1 << 20, stream)
        device.copy_within(rows([(1 << 20, 0, 1 << 20)], address), stream)
        device.zero(address, 1 << 20, stream)
        device.copy_out(staging, address, 2 << 20, stream)
        fences = Fences(device)
        fence = fences.after(stream)
        fence.wait()  # no limit: the device's wait has none
        assert fence.done()
        assert ctypes.string_at(staging, 2 << 20) == bytes(1 << 20) + content
        del fence
        fences.close()
        device.free(address)
        device.free(staging)

    def test_one_stream_waits_for_another(self, device: Device, new_stream: Callable[[], int]) -> None:
        fences = Fences(device)
        first, second = new_stream(), new_stream()
        size, n = 1 << 20, 8
        address, staging = device.alloc(2 * size), device.alloc_pinned(size)
        for value in range(1, n + 1):
            ctypes.memset(staging, value, size)
            device.copy_in(address, staging, size, first)
            copied = fences.after(first)
            copied.make_wait(second)
            device.copy_within(rows([(size, 0, size)], address), second)
            fences.after(second).make_wait(first)
            copied.wait()  # no limit: the device's wait has none
            assert copied.done()
        assert read(device, address + size, size) == bytes([n]) * size
        del copied
        fences.close()
        device.free(address)
        device.free(staging)

    def test_an_event_is_done_until_it_is_recorded(self, device: Device) -> None:
        event = device.create_event()
        assert device.event_done(event)
        device.wait_event(event)
        device.record_event(event, 0)
        device.wait_event(event)
        assert device.event_done(event)
        device.destroy_event(event)

    def test_memory_that_is_not_there(self, device: Device) -> None:
        with pytest.raises(DeviceError, match=r"asked .*\d+\.\d MiB"):
            device.alloc(1 << 62)
        with pytest.raises(DeviceError, match=r"asked .*\d+\.\d MiB"):
            device.alloc_pinned(1 << 62)
        assert device.device_bytes == device.pinned_bytes == 0
        address = device.alloc(1)
        assert read(device, address, 1) == b"\0"
        device.free(address)

    @pytest.mark.parametrize("n_bytes", [0, -1])
    def test_an_allocation_has_bytes(self, device: Device, n_bytes: int) -> None:
        for take in (device.alloc, device.alloc_pinned):
            with pytest.raises(ValueError, match="at least one byte"):
                take(n_bytes)

    def test_free_of_something_else_is_refused(self, device: Device) -> None:
        with pytest.raises(DeviceError, match="no live allocation"):
            device.free(PAGE)
        address = device.alloc(1)
        device.free(address)
        with pytest.raises(DeviceError, match="no live allocation"):
            device.free(address)

    def test_close_complains_about_memory_that_is_left(self, device: Device) -> None:
        address = device.alloc(100)
        with pytest.raises(DeviceError, match="1 allocations still live"):
            device.close()
        device.free(address)
        device.close()
        with pytest.raises(DeviceError, match="was closed"):
            device.alloc(1)

    def test_an_error_within_the_block_is_not_replaced(self, device: Device) -> None:
        address = device.alloc(1)
        with pytest.raises(KeyError), device:
            raise KeyError("mine")
        with pytest.raises(DeviceError, match="was closed"):
            device.alloc(1)
        device.free(address)

    def test_a_stream_that_is_none_of_the_devices(self, device: Device) -> None:
        with pytest.raises(DeviceError, match="asked"):
            device.destroy_stream(12345)
