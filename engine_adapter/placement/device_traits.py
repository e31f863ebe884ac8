"""What `auto` means on each kind of device: a table with a row for each kind, found by the engine's name of a device.

    "CUDA1" ─► traits_of ─► the row of CUDA ─► looks_up, captures, computes_in_slab, follows_demand, ...

A setting that is `auto` asks its column here, and no other code matches a device's name. The decode look-up on another
device is one row with `looks_up`, and one seam: the driver that opens the device for our kernels, which `driver` names
(`hip/driver/vendor.py`).

Two settings are not here. `MOE_PREFILL_STREAM_TOKENS` asks the device where its memory is (`Device.has_own_memory`).
`MOE_DECODE_PREFETCH` depends on the size of experts, wherever decode looks experts up on the device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from expertier.hip.driver.vendor import Vendor


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """One kind of the engine's devices, and its answers to every `auto`.

    kind                      what ggml's names of such devices begin with
    driver                    our driver that opens the device for our kernels; None: there is none
    looks_up                  `MOE_DECODE_GATE`: decode looks experts up on the device
    captures                  `MOE_DECODE_CAPTURE`: a decode graph is launched at once
    capture_off_variable      llama.cpp's own variable that turns such graphs off
    computes_in_slab          `MOE_SLAB_COMPUTE`: the engine's compute buffers lie in the slab
    takes_parts_of_buffers    the backend accepts a part of a buffer; where it does not, `MOE_SLAB_COMPUTE=1` is refused
    follows_demand            `MOE_REBALANCE`: numbers of slots follow demand
    is_listed_gpu             llama.cpp lists the device among the GPUs that `main_gpu` counts
    """

    kind: str
    driver: Vendor | None = None
    looks_up: bool = False
    captures: bool = False
    capture_off_variable: str | None = None
    computes_in_slab: bool = False
    takes_parts_of_buffers: bool = True
    follows_demand: bool = True
    is_listed_gpu: bool = True

    def without_driver(self) -> Self:
        """Return the traits of a device of this kind that no driver of ours can open."""
        return replace(self, driver=None, looks_up=False, captures=False, computes_in_slab=False)


CUDA = DeviceTraits(
    "CUDA",
    driver=Vendor.CUDA,
    looks_up=True,
    captures=True,
    capture_off_variable="GGML_CUDA_DISABLE_GRAPHS",
    computes_in_slab=True,
)
# `auto` leaves everything off on ROCm, where nobody has run it yet; a user can ask for it.
ROCM = DeviceTraits(
    "ROCm", driver=Vendor.HIP, capture_off_variable="GGML_CUDA_DISABLE_GRAPHS", follows_demand=False
)
# `auto` leaves moves of slots off on Vulkan, where nobody has run them yet.
VULKAN = DeviceTraits("Vulkan", follows_demand=False)
# Moves would go over the network, and RPC's backend ends the process when it is given a part of a buffer.
RPC = DeviceTraits("RPC", takes_parts_of_buffers=False, follows_demand=False)
# Slots in host memory stay where they are, as no device moves them.
CPU = DeviceTraits("CPU", follows_demand=False, is_listed_gpu=False)
BLAS = DeviceTraits("BLAS", is_listed_gpu=False)
# Our own proxy devices, which llama.cpp must not count as GPUs.
PROXY = DeviceTraits("EXPERTS_", is_listed_gpu=False)
UNKNOWN = DeviceTraits("")

TABLE = (CUDA, ROCM, VULKAN, RPC, CPU, BLAS, PROXY)
"""One row for each kind; a device of any other kind has the traits of `UNKNOWN`."""

_HOST = "host"
_TRAILING_NUMBER = re.compile(r"\d+$")


def traits_of(name: str) -> DeviceTraits:
    """Return the traits of ggml's device `name`, such as `CUDA0` or `RPC0[host:50052]`."""
    for row in TABLE:
        if name.startswith(row.kind):
            return row if row.driver is None or ordinal_of(name) is not None else row.without_driver()
    return UNKNOWN


def ordinal_of(name: str) -> int | None:
    """Return the number by which a driver of ours opens ggml's device `name`; None where no driver can."""
    for row in TABLE:
        number = name.removeprefix(row.kind)
        if row.driver is not None and name.startswith(row.kind) and number.isascii() and number.isdigit():
            return int(number)
    return None


def family_of(name: str) -> str:
    """Return the device's name without its number: the devices of one family share a model under `auto`."""
    return _TRAILING_NUMBER.sub("", name)


def engine_name(device_name: str) -> str:
    """Return ggml's name of a device that `open_device` knows as `device_name`: `host`, `cuda:N` or `hip:N`."""
    vendor, _, number = device_name.partition(":")
    if vendor == _HOST:
        return CPU.kind
    return f"{next(row.kind for row in TABLE if row.driver == Vendor(vendor))}{number}"
