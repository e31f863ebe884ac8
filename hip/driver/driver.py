"""A vendor's driver library, whose calls raise an error where they fail."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from expertier.errors import DriverError
from expertier.hip.driver import bindings
from expertier.hip.driver.codes import Code
from expertier.hip.driver.libraries import load_runtime
from expertier.hip.driver.pinned_ranges import PinnedRanges
from expertier.hip.driver.vendor import TRAITS, Traits, Vendor

_drivers: dict[tuple[Vendor, str], Driver] = {}
_drivers_lock = threading.Lock()


class Driver:
    """A loaded driver. `call(name, ...)` makes a call of `bindings.py` and raises `DriverError` where it fails.

    `open_driver` makes one object for each library, which lives as long as the process. Thread-safe.
    """

    def __init__(self, vendor: Vendor, library: ctypes.CDLL) -> None:
        """Bind the calls that the library has; using a missing call raises `DriverError`."""
        self.vendor = vendor
        self.traits: Traits = TRAITS[vendor]
        self.library = library
        self.pinned = PinnedRanges()
        own = bindings.HIP_CALLS if vendor is Vendor.HIP else bindings.CUDA_CALLS
        rows: dict[str, tuple[str, bindings.ArgTypes]] = dict(own)
        for name, (hip, cuda, arguments) in bindings.CALLS.items():
            rows[name] = (hip if vendor is Vendor.HIP else cuda, arguments)
        self._symbols = {name: symbol for name, (symbol, _) in rows.items()}
        self._functions: dict[str, Callable[..., int]] = {}
        self._addresses: dict[str, int] = {}
        self._last_error = bindings.bind(library, "hipGetLastError", ()) if vendor is Vendor.HIP else None
        for name, (symbol, arguments) in rows.items():
            function = bindings.bind(library, symbol, arguments)
            if function is not None:
                keeps_lock = name in bindings.SHORT_CALLS
                self._functions[name] = bindings.keeping_lock(function) if keeps_lock else function

    @property
    def path(self) -> str:
        """The name under which the library was loaded."""
        return str(self.library._name)

    @property
    def missing(self) -> list[str]:
        """The symbols that the library does not have."""
        return sorted(self._symbols[name] for name in self._symbols.keys() - self._functions.keys())

    def address(self, name: str) -> int:
        """Return the address of a call, for compiled code. Raises `DriverError` where the library lacks the call."""
        if name not in self._addresses:
            if name not in self._functions:
                self.raw(name)  # raises the error
            pointer = ctypes.cast(getattr(self.library, self._symbols[name]), ctypes.c_void_p)
            self._addresses[name] = pointer.value or 0
        return self._addresses[name]

    def has(self, name: str) -> bool:
        """Whether the library has a call."""
        return name in self._functions

    def raw(self, name: str, *arguments: Any) -> int:
        """Make a call and return its code without a check. Raises `DriverError` where the library lacks the call."""
        try:
            function = self._functions[name]
        except KeyError:
            raise DriverError(
                f"{self.path} has no {self._symbols[name]}: it is too old, or no {self.vendor} driver",
                call=self._symbols[name],
                code=Code.NOT_SUPPORTED,
            ) from None
        return function(*arguments)

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call. Raises `DriverError` for any code except success."""
        code = self.raw(name, *arguments)
        if code:
            raise self.error(name, code)

    def ask(self, name: str, *arguments: Any) -> bool:
        """Make a call that tells whether work is done; return False for "not ready". Raises as `call`."""
        code = self.raw(name, *arguments)
        if code == Code.NOT_READY:
            self.forget_error()
            return False
        if code:
            raise self.error(name, code)
        return True

    def handle(self, name: str, *arguments: Any) -> int:
        """Make a call whose first argument receives a handle or an address, and return it."""
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def integer(self, name: str, *arguments: Any) -> int:
        """Make a call whose first argument receives an int, and return the int."""
        out = ctypes.c_int()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def size(self, name: str, *arguments: Any) -> int:
        """Make a call whose first argument receives a size, and return the size."""
        out = ctypes.c_size_t()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def error(self, name: str, code: int, doing: str = "") -> DriverError:
        """Return the error for the code of a call; it names the call, the code, its name, and the action `doing`."""
        self.forget_error()
        symbol = self._symbols[name]
        text = f"{symbol} returned {code} ({self.error_name(code)})"
        return DriverError(f"{doing}: {text}" if doing else text, call=symbol, code=code)

    def error_name(self, code: int) -> str:
        """Return the vendor's name for a code."""
        if self.vendor is Vendor.HIP:
            function: Any = self.library.hipGetErrorName
            function.restype, function.argtypes = ctypes.c_char_p, (ctypes.c_int,)
            name: bytes | None = function(code)
        else:
            out = ctypes.c_char_p()
            self.library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(out))
            name = out.value
        return name.decode() if name else "no name"

    def device_count(self) -> int:
        """Return the number of devices. Raises `DriverError` where the driver does not start or finds no device."""
        self.call("init", 0)
        return self.integer("device_count")

    def version(self) -> int:
        """Return the driver's version as one number, as the vendor encodes it (`Traits`)."""
        return self.integer("version")

    def forget_error(self) -> None:
        """Clear the last error that HIP keeps for this thread."""
        # Other code in the process looks at the last error after calls of its own, and would take our error, or our
        # "not ready", for a failure of its call.
        if self._last_error is not None:
            self._last_error()


def open_driver(vendor: Vendor, environ: Mapping[str, str] = os.environ) -> Driver:
    """Return the vendor's driver, which is loaded once. Raises `DeviceError` where its library cannot be loaded."""
    key = (vendor, environ.get(TRAITS[vendor].library_variable, ""))
    with _drivers_lock:
        driver = _drivers.get(key)
        if driver is None:
            driver = _drivers[key] = Driver(vendor, load_runtime(vendor, environ))
        return driver
