"""The probe: this machine's rates as one document, made once and saved."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import expertier
from expertier.atomic_file import check_output, output
from expertier.cache_root import CACHE_VARIABLE, cache_root
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.errors import ConfigError
from expertier.failures import reason, remedy
from expertier.hip.device import Device
from expertier.hip.kernels.cache_folder import cache_subfolder
from expertier.planner.predict.rates import MachineRates, PathRate
from expertier.probe.device_rates import DeviceRates, measure_device
from expertier.probe.engine_rates import EngineRates, measure_engine
from expertier.probe.file_rates import FileRates, measure_file
from expertier.tiers.shared.host_memory import total_bytes
from expertier.trusted_folder import require_trusted
from expertier.units import MIB, mib
from expertier.work_folder import work_folder

FORMAT = 2
_SAMPLE_BYTES = 128 * MIB
_FILE_SPREAD = 0.3
_LINK_SPREAD = 0.15
_READ_SHARE = 0.6
"""The share of a copy's rate (reads and writes together) that matrix kernels reach; this is a guess."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The measurements and the rates that follow from them; `key` names the machine, the device and the engine."""

    key: dict[str, Any]
    rates: MachineRates
    details: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, for `--json` and for the file."""
        return {"format": FORMAT, "machine": self.key, "rates": self.rates.as_dict(), **self.details}


def machine_key(device_name: str, n_threads: int) -> dict[str, Any]:
    """Return what the rates depend on: where one of these values differs, the probe is made anew."""
    try:
        engine = version("xllamacpp")
    except PackageNotFoundError:
        engine = None
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "ram_bytes": total_bytes(),
        "system": platform.release(),
        "device": device_name,
        "threads": n_threads,
        "engine": engine,
        "expertier": expertier.__version__,
    }


def probe_file(key: dict[str, Any]) -> Path:
    """Return the file in which the probe of this machine is saved; it may not exist.

    Raises ConfigError where this user has no cache folder.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "probe" / f"{name}.json"


def saved_probe(key: dict[str, Any]) -> Probe | None:
    """Return the probe that was measured before; None where there is none that can be used.

    Raises ConfigError where other users could have put it there.
    """
    try:
        file = probe_file(key)
    except ConfigError:  # a user without a cache folder
        return None
    require_trusted(file, cache_root())
    try:
        document = json.loads(file.read_text())
        if document["format"] != FORMAT or document["machine"] != key:
            return None
        details = {name: document[name] for name in ("files", "device", "seconds")}
        return Probe(key, MachineRates.from_dict(document["rates"]), details)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_probe(
    key: dict[str, Any],
    device: Device,
    engine: LoadedEngine | None,
    say: Callable[[str], None],
    *,
    model: Path | None = None,
    n_threads: int = 0,
    engine_device: str = "CPU",
) -> Probe:
    """Measure, and save the result. `model` is read instead of a file in the cache folder, whose disk may be another.

    `engine_device` is the engine's own name of `device`.

    Raises ConfigError where nothing can be written, and what opening models on the engine raises.
    """
    start = time.perf_counter()
    _make_folder(key)
    say("reading a file")
    files = _measure_file(model)
    say(f"copying on {device.name}")
    moved = measure_device(device)
    ran = None
    if engine is not None:
        ran = measure_engine(engine, say, n_threads=n_threads, device=engine_device)
    details: dict[str, Any] = {
        "files": {name: getattr(files, name) for name in FileRates.__slots__},
        "device": {name: getattr(moved, name) for name in DeviceRates.__slots__},
        "seconds": time.perf_counter() - start,
    }
    probe = Probe(key, rates_of(files, moved, ran), details)
    with output(probe_file(key), "what was measured") as unfinished:
        unfinished.write_text(json.dumps(probe.as_dict(), indent=1))
    return probe


def rates_of(files: FileRates, moved: DeviceRates, ran: EngineRates | None) -> MachineRates:
    """Return the rates that follow from what was measured.

    Where the device has a link and the engine was not run on it, it is assumed that weights are read at a share of the
    device's copy rate, and that missed experts cross the link as fast as copies.
    """
    cached = files.page_cache or 2e9
    disk = max(files.disk_cold or 0.0, files.disk_direct or 0.0) or 5e8
    if moved.link is not None and ran is None:
        weights = PathRate(
            2 * moved.between_slots * _READ_SHARE, (moved.read_back_s or 0.0) + 1e-5, 0.4, True
        )
        return MachineRates(
            decode=weights,
            prefill=PathRate(weights.bytes_per_s * 6, 0.0, 0.5),
            pool=PathRate(moved.link, 1e-5, _LINK_SPREAD, True),
            page_cache=PathRate(1 / (1 / cached + 1 / moved.link), 5e-5, _FILE_SPREAD, True),
            disk=PathRate(1 / (1 / disk + 1 / moved.link), 1e-4, _FILE_SPREAD, True),
        )
    if ran is None:
        weights = PathRate(moved.between_slots * _READ_SHARE, 2e-5, 0.5)
        pool = PathRate(moved.between_slots, 1e-4, _FILE_SPREAD, True)
        return MachineRates(
            decode=weights,
            prefill=PathRate(weights.bytes_per_s * 4, 0.0, 0.5),
            pool=pool,
            page_cache=PathRate(1 / (1 / cached + 1 / pool.bytes_per_s), 2e-4, _FILE_SPREAD, True),
            disk=PathRate(1 / (1 / disk + 1 / pool.bytes_per_s), 2e-4, _FILE_SPREAD, True),
        )
    return MachineRates(
        decode=ran.decode,
        prefill=ran.prefill,
        pool=ran.pool,
        page_cache=ran.page_cache,
        disk=PathRate(
            1 / (1 / disk + 1 / ran.page_cache.bytes_per_s),
            ran.page_cache.each_s,
            _FILE_SPREAD,
            measured=True,
        ),
        token_s=ran.token_s,
        lookup_s=ran.lookup_s,
    )


def _make_folder(key: dict[str, Any]) -> None:
    """Make the folder for saved probes. Raises ConfigError where it cannot be made, or written to."""
    try:
        cache_subfolder("probe")
    except OSError as error:
        raise ConfigError(
            f"the cache folder {cache_root()} cannot be made: {reason(error)}; set {CACHE_VARIABLE} to a folder of "
            "yours"
        ) from error
    check_output(probe_file(key), "what is measured")


def _measure_file(model: Path | None) -> FileRates:
    if model is not None:
        try:
            return measure_file(model)
        except OSError as error:
            raise ConfigError(f"{model} cannot be read: {reason(error)}; {remedy(error)}") from error
    folder = cache_root() / "probe"
    try:
        with work_folder(".sample-", folder) as work, open(work / "sample", "wb") as file:
            block = os.urandom(MIB)
            for _ in range(_SAMPLE_BYTES // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return measure_file(Path(file.name))
    except OSError as error:
        raise ConfigError(
            f"a file of {mib(_SAMPLE_BYTES)} to read cannot be written to {folder}: {reason(error)}; {remedy(error)}, "
            f"by {CACHE_VARIABLE}; or name a large file to read instead"
        ) from error


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
