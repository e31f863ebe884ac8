"""A model's layers on two real GPUs: each fills, evicts and ends its slots in zeros in its own memory, both at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from expertier.errors import DeviceError
from expertier.hip import open_device
from two_device_tiers import check_both


def test_both_at_once(gpu_name: str) -> None:
    vendor = gpu_name.partition(":")[0]
    with ExitStack() as closing:
        try:
            devices = [closing.enter_context(open_device(f"{vendor}:{number}")) for number in range(2)]
        except DeviceError as error:
            pytest.skip(f"this takes two GPUs: {error}")
        check_both(devices, rounds=20)
