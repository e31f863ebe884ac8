"""Tiers on two fake GPUs, whose streams dawdle: each device's memory, pinned copies and fills, both at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from devices.two_device_tiers import check_both
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries
from expertier.hip.open import open_gpu


def test_both_at_once(
    fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake_libraries.environ().items():
        monkeypatch.setenv(name, value)
    fake.set("devices", 2)
    fake.set("jitter_us", 200)
    with ExitStack() as closing:
        devices = [
            closing.enter_context(open_gpu(vendor, number, fake_libraries.environ())) for number in range(2)
        ]
        check_both(devices, rounds=2)
