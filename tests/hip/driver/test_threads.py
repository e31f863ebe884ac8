"""A device that several threads use at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from devices.device_contract import moved, random_bytes, read, rows
from expertier.hip.fake import FakeDriver
from expertier.hip.fence import Fences
from expertier.hip.gpu.device import GpuDevice
from limits.waits import joined

OpenFake = Callable[..., GpuDevice]

THREADS, ROUNDS, SIZE = 4, 10, 200_000


@pytest.mark.deep
@pytest.mark.parametrize("vendor", ["cuda"], indirect=True)
def test_threads_do_not_disturb_each_other(fake: FakeDriver, open_fake: OpenFake) -> None:
    """Each has its memory and stream; moves share the device's tables and scratch."""
    fake.set("jitter_us", 300)
    failures: list[BaseException] = []
    with open_fake() as device:
        fences = Fences(device)

        def work(number: int) -> None:
            try:
                for turn in range(ROUNDS):
                    content = random_bytes(SIZE, number * ROUNDS + turn)
                    stream = device.create_stream(low_priority=bool(turn % 2))
                    block, staging = device.alloc(SIZE), device.alloc_pinned(SIZE)
                    ctypes.memmove(staging, content, SIZE)
                    device.copy_in(block, staging, SIZE, stream)
                    chain = [((i + 1) * 1000, i * 1000, 1000) for i in range(100)]
                    shift = [(3, 0, SIZE - 3)]
                    device.copy_within(rows(chain, block), stream)
                    device.copy_within(rows(shift, block), stream)
                    device.copy_out(staging, block, SIZE, stream)
                    fences.after(stream).wait()  # no limit: the device's wait has none
                    assert ctypes.string_at(staging, SIZE) == moved(moved(content, chain), shift)
                    device.destroy_stream(stream)
                    device.free(block)
                    device.free(staging)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        joined(*threads)
        fences.close()
        assert not failures
        assert device.device_bytes == device.pinned_bytes == 0


def test_waiting_lets_other_threads_run(fake: FakeDriver, open_fake: OpenFake) -> None:
    """A thread that waits for the GPU does not hold Python's lock."""
    with open_fake() as device:
        block = device.alloc(100)
        fake.set("held", 1)
        device.zero(block, 100)
        waiter = threading.Thread(target=device.synchronize, daemon=True)
        waiter.start()
        assert waiter.is_alive()
        fake.set("held", 0)  # reached, though the waiter waits
        joined(waiter)
        assert read(device, block, 100) == bytes(100)
        device.free(block)
