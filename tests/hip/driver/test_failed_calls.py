"""Every driver call fails once, at each place where it is made: an error, nothing left behind, and it works again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from devices.device_contract import random_bytes, read, rows, write
from devices.vendors import quick_on_hip
from expertier.errors import DeviceError
from expertier.hip.driver.bindings import CALLS, CUDA_CALLS, HIP_CALLS
from expertier.hip.driver.vendor import TRAITS, Vendor
from expertier.hip.fake import FakeDriver
from expertier.hip.gpu.bounce import Bounce
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.slab_memory import open_slab_memory
from expertier.hip.gpu.vmm.virtual_memory import LEAST_CHUNK_BYTES

OpenFake = Callable[..., GpuDevice]

_GIVE_BACK = {
    "free",
    "host_free",
    "host_unregister",
    "stream_destroy",
    "event_destroy",
    "module_unload",
    "unreserve",
    "release",
    "unmap",
    "context_release",
    "disable_peer",
}
"""What fails here leaves the thing behind: nobody can do better."""

_MOST = 100


def work(open_fake: OpenFake) -> bytes:
    """Use everything once; returns bytes that passed through all of it."""
    content = random_bytes(300 * 1000)
    device = open_fake()
    with device:
        device.warm_up(512 << 10)
        slab = open_slab_memory(device, LEAST_CHUNK_BYTES, vmm=True, capacity_bytes=2 * LEAST_CHUNK_BYTES)
        try:
            if slab.resizable:
                slab.resize(2 * LEAST_CHUNK_BYTES)
            write(device, slab.base, content)
            stream, event = device.create_stream(low_priority=True), device.create_event()
            moves = [((300 + i) * 1000, (299 - i) * 1000, 1000) for i in range(300)]
            device.copy_within(rows(moves, slab.base), stream)
            device.copy_within(rows([(1000 * 1000, 1000 * 1000 + 1, 2000)], slab.base), stream)
            device.record_event(event, stream)
            device.stream_wait_event(0, event)
            device.wait_event(event)
            with Bounce(device, 4096) as bounce:
                bounce.copy_in(slab.base, np.frombuffer(content, np.uint8).ctypes.data, 10_000)
            if slab.resizable:
                slab.resize(LEAST_CHUNK_BYTES)
            return read(device, slab.base + 300_000, 300_000)
        finally:
            slab.close()


def calls(vendor: Vendor) -> list[str]:
    own = HIP_CALLS if vendor is Vendor.HIP else CUDA_CALLS
    names = {name: row[TRAITS[vendor].column] for name, row in CALLS.items()}
    names |= {name: symbol for name, (symbol, _) in own.items()}
    return [symbol for name, symbol in names.items() if name not in _GIVE_BACK]


@quick_on_hip
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_call_may_fail_each_time(fake: FakeDriver, vendor: Vendor, open_fake: OpenFake) -> None:
    expected = work(open_fake)
    assert fake.live() == {}
    failed = 0
    for symbol in calls(vendor):
        # The first calls of each kind, then ever wider apart: there are thousands of some.
        nth = 1
        while nth < _MOST:
            fake.fail(symbol, nth, 999)
            try:
                found = work(open_fake)
            except DeviceError:
                failed += 1
            else:
                # Not reached, or with a fallback: the result must be right.
                assert found == expected, f"call {nth} of {symbol}"
            happened = fake.get("faults")
            fake.reset()
            check_nothing_is_left(fake, symbol, nth)
            if not happened:
                break
            nth *= 2
    assert failed > len(calls(vendor)) / 2
    assert work(open_fake) == expected


def check_nothing_is_left(fake: FakeDriver, symbol: str, nth: int) -> None:
    assert fake.live() == {}, f"after call {nth} of {symbol} failed"
