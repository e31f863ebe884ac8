"""The device look-up of decode graphs (ggml_proxy/lookup/device_lookup.h): its kernels, and the driver's calls."""

from __future__ import annotations

import ctypes as ct
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.placement.device_traits import ordinal_of, traits_of
from expertier.errors import DeviceError
from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.runtime import Stream
from expertier.hip.driver.vendor import Vendor
from expertier.hip.kernels.cache import compiled, kernel_source
from expertier.hip.kernels.compiler import RuntimeCompiler
from expertier.hip.kernels.module import KernelModule
from expertier.hip.open import open_driver_gpu

_log = logging.getLogger(__name__)

_ERROR_BYTES = 4096
_CAPTURE_CALLS = (
    "capture_begin",
    "capture_end",
    "graph_instantiate",
    "graph_launch",
    "graph_exec_destroy",
    "graph_destroy",
)
_SOON_BYTES = 4 << 20
"""Experts of up to so many bytes arrive while one layer computes, so the experts of the next layer are fetched: these
are predicted best. Larger experts need two layers' time (docs/measurements/gpu-engine.md)."""


class DeviceLookup:
    """What the device look-up needs from the driver, until `close`: the loaded kernels, and a stream of its own."""

    def __init__(
        self,
        vendor: Vendor,
        ordinal: int,
        environ: Mapping[str, str],
        prefetch: int | Literal["auto"] = 0,
        *,
        expert_bytes: int = 0,
        captures: bool = False,
    ) -> None:
        """Compile and load the kernels; experts of `expert_bytes` are fetched `prefetch` layers ahead.

        With `captures` the proxy may capture graphs, where the driver can.

        Raises:
            DeviceError: the driver, its compiler or the GPU is missing.
        """
        with ExitStack() as undo:
            self._gpu = open_driver_gpu(vendor, ordinal, environ)
            undo.callback(self._gpu.close)
            compiler = RuntimeCompiler(vendor, load_compiler(vendor, self._gpu.driver.library, environ))

            def kernel(name: str, file: str = "") -> int:
                code = compiled(compiler, kernel_source(f"{file or name}.cu"), self._gpu.architecture())
                return undo.enter_context(KernelModule(self._gpu, code)).function(name).handle

            stream = undo.enter_context(Stream(self._gpu))
            driver = self._gpu.driver
            self.calls = abi.DeviceLookup(
                launch=driver.address("launch"),
                stream_wait=driver.address("stream_wait_event"),
                event_record=driver.address("event_record"),
                function=kernel("device_lookup"),
                stream=stream.handle,
                predict=kernel("predict") if prefetch else None,
                event_query=driver.address("event_query"),
                layers_ahead=1 + (expert_bytes > _SOON_BYTES) if prefetch == "auto" else prefetch,
                prefetch_pauses=int(prefetch == "auto"),
                copy=kernel("move_rows_by_value", "moves"),
            )
            if captures and all(map(driver.has, _CAPTURE_CALLS)):
                for name in _CAPTURE_CALLS:
                    setattr(self.calls, name, driver.address(name))
                if driver.has("graph_exec_update"):
                    self.calls.graph_exec_update = driver.address("graph_exec_update")
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unload the kernels; no work of theirs may be queued."""
        self._undo.close()


def open_device_lookup(
    proxy: ct.CDLL,
    tiers: int,
    device: str,
    wanted: bool | Literal["auto"],
    *,
    prefetch: int | Literal["auto"] = "auto",
    expert_bytes: int = 0,
    capture: bool | Literal["auto"] = "auto",
    environ: Mapping[str, str] = os.environ,
) -> DeviceLookup | None:
    """Give the proxy's `tiers` on ggml's `device` a device look-up where it is wanted and works; otherwise log why not.

    `auto` asks the device's traits. The look-up fetches the experts that layers are predicted to use `prefetch` layers
    ahead (0: it fetches none). With `auto` that is one layer or two layers, depending on `expert_bytes`, as long as it
    pays. With `capture` a whole decode graph is launched at once; `auto` asks the device's traits, and does not capture
    where the user has turned such graphs off in llama.cpp. None of these settings changes what the engine computes.
    """
    traits, ordinal = traits_of(device), ordinal_of(device)
    if not (traits.looks_up if wanted == "auto" else wanted):
        return None
    lookup: DeviceLookup | None = None
    try:
        if traits.driver is None or ordinal is None:
            raise DeviceError(
                f"{device} is driven by neither CUDA nor HIP, and the kernels need one of these drivers"
            )
        if capture == "auto":
            capture = traits.captures and traits.capture_off_variable not in environ
        lookup = DeviceLookup(
            traits.driver, ordinal, environ, prefetch, expert_bytes=expert_bytes, captures=capture
        )
        error = ct.create_string_buffer(_ERROR_BYTES)
        if not proxy.expertier_tiers_open_device_lookup(tiers, ct.byref(lookup.calls), error, len(error)):
            raise DeviceError(error.value.decode(errors="replace"))
        for line in error.value.decode(errors="replace").splitlines():
            part, _, reason = line.partition("\t")
            _log.warning("event=%s enabled=0 device=%s reason=%s", part, device, reason)
    except DeviceError as error:
        if lookup is not None:
            lookup.close()
        _log.warning("event=device_lookup enabled=0 device=%s reason=%s", device, error)
        return None
    _log.info("event=device_lookup enabled=1 device=%s", device)
    return lookup
