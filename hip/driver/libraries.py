"""Finds and loads the vendors' shared libraries."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from expertier.errors import DeviceError
from expertier.hip.driver.vendor import TRAITS, Vendor


def load_runtime(vendor: Vendor, environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """Load the driver library: the one that the vendor's variable names, or the first usual name that works.

    Raises `DeviceError`, which lists the names that were tried.
    """
    traits = TRAITS[vendor]
    return _load_first(traits.library_names, traits.library_variable, environ)


def load_compiler(
    vendor: Vendor, runtime: ctypes.CDLL, environ: Mapping[str, str] = os.environ
) -> ctypes.CDLL:
    """Load the runtime compiler: the one that the vendor's variable names, or one of the system or of PyPI's wheels.

    HIP's compiler is part of `runtime` in older releases. Raises `DeviceError`, which lists the names that were tried.
    """
    traits = TRAITS[vendor]
    if vendor is Vendor.HIP and not environ.get(traits.compiler_variable):
        if hasattr(runtime, "hiprtcCompileProgram"):
            return runtime
        return _load_first(traits.compiler_names, traits.compiler_variable, environ)
    wheels = [str(path) for path in _in_wheels(traits.compiler_names)] if vendor is Vendor.CUDA else []
    return _load_first([*traits.compiler_names, *wheels], traits.compiler_variable, environ)


def _load_first(names: Sequence[str], variable: str, environ: Mapping[str, str]) -> ctypes.CDLL:
    chosen = environ.get(variable)
    failures = []
    for name in [chosen] if chosen else names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    if chosen:
        raise DeviceError(f"{variable}={chosen!r} cannot be loaded ({failures[0]}); unset it or name another")
    raise DeviceError(
        f"none of {', '.join(names)} could be loaded ({failures[0]}): install the vendor's runtime, or name "
        f"the library in {variable}"
    )


def _in_wheels(names: Sequence[str]) -> Iterator[Path]:
    """Yield the libraries among PyPI's `nvidia-*` wheels, which share the namespace package `nvidia`."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for folder in (found.submodule_search_locations or ()) if found else ():
        for name in names:
            yield from sorted(Path(folder).glob(f"*/lib/{name}"))
