"""Opens a device by its name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.driver.driver import open_driver
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.vendor import Vendor
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.host import HostDevice
from expertier.interrupts import handing_over
from expertier.units import mib

_log = logging.getLogger(__name__)


def open_device(name: str = "auto", *, environ: Mapping[str, str] = os.environ) -> Device:
    """Open a device: `hip:N` or `cuda:N` for a GPU by its number, `host`, or `auto`.

    `auto` takes the GPU with the most free memory, or the host where there is no GPU, and logs why. Variables in
    `environ` can name the driver libraries to load (docs/gpu-devices.md). Raises `DeviceError` for an unknown name, and
    for a device that does not exist or cannot be used.
    """
    if name == "host":
        return HostDevice()
    if name == "auto":
        return open_best(environ)
    chosen = re.fullmatch(r"(hip|cuda):(\d+)", name, re.ASCII)
    if chosen is None:
        raise DeviceError(f"asked for device {name!r}: known are 'auto', 'host', 'hip:N' and 'cuda:N'")
    return open_gpu(chosen[1], int(chosen[2]), environ)


@handing_over(lambda device, *_: device.close())
def open_gpu(vendor: str, ordinal: int, environ: Mapping[str, str]) -> Device:
    """Open one GPU. Raises `DeviceError` with the driver's reason."""
    try:
        return _device(open_driver_gpu(Vendor(vendor), ordinal, environ), environ)
    except DeviceError as error:
        raise DeviceError(f"asked for device '{vendor}:{ordinal}': {error}") from error


def open_driver_gpu(vendor: Vendor, ordinal: int, environ: Mapping[str, str]) -> Gpu:
    """Open a vendor's driver and return one of its GPUs. Raises `DeviceError`."""
    return Gpu(open_driver(vendor, environ), ordinal)


@handing_over(lambda device, *_: device.close())
def open_best(environ: Mapping[str, str]) -> Device:
    """Open the GPU with the most free memory, among those that can be used; the host where none can be used."""
    reasons: list[str] = []
    best: Gpu | None = None
    best_free = -1
    for gpu in _gpus(environ, reasons):
        free, total = gpu.memory()
        reasons.append(f"{gpu.name} ({gpu.product()}) has {mib(free)} of {mib(total)} free")
        loser = gpu
        if free > best_free:
            loser, best, best_free = best or gpu, gpu, free
        if loser is not best:
            loser.close()
    why = "; ".join(reasons)
    if best is not None:
        try:
            device = _device(best, environ)
        except DeviceError as error:
            why += f"; {best.name} cannot be used: {error}"
        else:
            _log.info("device auto is %s: %s", best.name, why)
            return device
    _log.info("device auto is the host: %s", why)
    return HostDevice()


def _gpus(environ: Mapping[str, str], reasons: list[str]) -> list[Gpu]:
    """Return the GPUs that can be used, and add to `reasons` why other GPUs cannot."""
    found = []
    for vendor in Vendor:
        try:
            driver = open_driver(vendor, environ)
            count = driver.device_count()
            if not count:
                reasons.append(f"{vendor}: {driver.path} has no devices")
        except DeviceError as error:
            reasons.append(f"{vendor}: {error}")
            continue
        for ordinal in range(count):
            try:
                found.append(Gpu(driver, ordinal))
            except DeviceError as error:
                reasons.append(f"{vendor}:{ordinal}: {error}")
    return found


def _device(gpu: Gpu, environ: Mapping[str, str]) -> Device:
    try:
        return GpuDevice(gpu, environ=environ)
    except BaseException:
        gpu.close()
        raise
