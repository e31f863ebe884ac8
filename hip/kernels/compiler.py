"""Compiles kernels with hiprtc or nvrtc, through one table of calls whose names differ in the prefix only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from expertier.errors import DeviceError
from expertier.hip.driver import bindings
from expertier.hip.driver.vendor import TRAITS, Vendor

_ARCHITECTURE_OPTION = {Vendor.HIP: "--offload-arch={}", Vendor.CUDA: "--gpu-architecture={}"}
_OPTIONS = {
    # Without -O3 hiprtc 5 does not optimise the loops of our kernels.
    Vendor.HIP: ("-O3",),
    Vendor.CUDA: (),
}


class RuntimeCompiler:
    """A vendor's runtime compiler, which works without a GPU. Thread-safe."""

    def __init__(self, vendor: Vendor, library: ctypes.CDLL) -> None:
        """Bind the library's calls. Raises `DeviceError` where a call is missing."""
        self.vendor = vendor
        self._prefix = "hiprtc" if vendor is Vendor.HIP else "nvrtc"
        self._library = library
        self._size_call, self._code_call = bindings.COMPILER_CODE_CALLS[TRAITS[vendor].column]
        size_types = bindings.COMPILER_CALLS["GetProgramLogSize"]
        code_types = bindings.COMPILER_CALLS["GetProgramLog"]
        rows = bindings.COMPILER_CALLS | {self._size_call: size_types, self._code_call: code_types}
        self._functions: dict[str, Any] = {}
        for name, arguments in rows.items():
            function = bindings.bind(library, self._prefix + name, arguments)
            if function is None:
                raise DeviceError(
                    f"{library._name} has no {self._prefix}{name}: it is no {vendor} runtime compiler, or too old"
                )
            self._functions[name] = function

    @property
    def path(self) -> str:
        """The name under which the library was loaded."""
        return str(self._library._name)

    def version(self) -> str:
        """Return the compiler's version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def options(self, architecture: str) -> list[str]:
        """Return the options for an architecture, such as `gfx906` or `sm_90`."""
        return [_ARCHITECTURE_OPTION[self.vendor].format(architecture), *_OPTIONS[self.vendor]]

    def compile(self, source: str, architecture: str, *, extra: Sequence[str] = ()) -> bytes:
        """Return machine code for `source`. Raises `DeviceError` with the compiler's message."""
        program = ctypes.c_void_p()
        options = [*self.options(architecture), *extra]
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"expertier.cu", 0, None, None)
        try:
            texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._functions["CompileProgram"](program, len(options), texts)
            if status:
                log = self._bytes(program, "GetProgramLogSize", "GetProgramLog").rstrip(b"\0 \n")
                raise DeviceError(
                    f"{self._prefix}CompileProgram for {architecture} returned {status} "
                    f"({self._status_name(status)}): {log.decode(errors='replace') or 'it said nothing'}"
                )
            return self._bytes(program, self._size_call, self._code_call)
        finally:
            self._functions["DestroyProgram"](ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, size_call: str, content_call: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_call, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(content_call, program, buffer)
        return buffer.raw[: size.value]

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise DeviceError(f"{self._prefix}{name} returned {status} ({self._status_name(status)})")

    def _status_name(self, status: int) -> str:
        function = getattr(self._library, f"{self._prefix}GetErrorString", None)
        if function is None:
            return "no name"
        function.restype, function.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        name: bytes | None = function(status)
        return name.decode() if name else "no name"
