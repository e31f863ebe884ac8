"""What the vendor's driver says of an address: on which of its devices the memory lies."""

from __future__ import annotations

import ctypes as ct
import re

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, and HIP's of the same number
_CALLS = {
    "CUDA": ("libcuda.so.1", "cuPointerGetAttribute"),
    "ROCm": ("libamdhip64.so", "hipPointerGetAttribute"),
}


def ordinal_of(device: str, address: int) -> int | None:
    """Return the number of the device that owns `address`, for devices of `device`'s kind; None where nobody knows."""
    kind = re.sub(r"\d+$", "", device)
    if kind not in _CALLS:
        return None
    library, name = _CALLS[kind]
    found = ct.c_int(-1)
    status = getattr(ct.CDLL(library), name)(ct.byref(found), ct.c_int(_DEVICE_ORDINAL), ct.c_uint64(address))
    assert status == 0, f"{name} returned {status} for {address:#x}"
    return found.value


def number_of(device: str) -> int:
    """Return the number in a device's name."""
    return int(device[len(device.rstrip("0123456789")) :])
