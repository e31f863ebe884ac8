"""The engine's libraries in this process, with our proxy registered in them and our host library beside them."""

from __future__ import annotations

import ctypes as ct
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from expertier.engine_adapter.abi.functions import declare_host, declare_proxy
from expertier.engine_adapter.abi.structs import HOST_ABI, PROXY_ABI
from expertier.engine_adapter.abi.type_sizes import block_size
from expertier.errors import EngineMismatchError
from expertier.interrupts import interrupts_deferred
from expertier.tiers.model.type_sizes import BlockSize

_LOG_WARNING = 3  # GGML_LOG_LEVEL_WARN


class LoadedEngine:
    """The one engine of this process: its libraries, our host library and, once needed, our proxy in it."""

    _loaded: ClassVar[LoadedEngine | None] = None

    def __init__(
        self, library_paths: tuple[Path, ...], libraries: Sequence[ct.CDLL], proxy_path: Path, host: ct.CDLL
    ):
        self.library_paths = library_paths
        self.host = host
        self._libraries = tuple(libraries)
        self._proxy_path = proxy_path
        self._proxy: ct.CDLL | None = None
        self._loading_proxy = threading.Lock()

    @classmethod
    def load(cls, library_paths: Sequence[Path], proxy_path: Path, host_path: Path) -> LoadedEngine:
        """Load the engine and both of our libraries; a second call returns the same object.

        `library_paths` are the engine's shared libraries, dependencies first: one file for a wheel that links
        everything statically, several for a build of one's own.

        Raises:
            EngineMismatchError: a library does not load, does not speak our interface, or this process already
                runs another engine.
        """
        paths = tuple(library_paths)
        if cls._loaded is not None:
            if cls._loaded.library_paths != paths:
                raise EngineMismatchError(
                    f"this process already runs the engine {cls._loaded.library_paths[-1]} and cannot load "
                    f"{paths[-1]} too; use a process of its own for each engine"
                )
            return cls._loaded
        with interrupts_deferred():  # what is loaded is kept
            cls._loaded = cls._load(paths, proxy_path, host_path)
        return cls._loaded

    @classmethod
    def _load(cls, paths: tuple[Path, ...], proxy_path: Path, host_path: Path) -> LoadedEngine:
        try:
            # RTLD_GLOBAL: our libraries leave ggml's and llama's symbols undefined and find them here.
            libraries = [ct.CDLL(str(path), mode=ct.RTLD_GLOBAL) for path in paths]
            host = ct.CDLL(str(host_path))
            declare_host(host)
        except (OSError, AttributeError) as error:
            raise _does_not_load(paths[-1], host_path, error) from error
        if host.expertier_host_abi() != HOST_ABI:
            raise _other_interface(host_path, host.expertier_host_abi(), HOST_ABI)
        host.expertier_host_start()
        return cls(paths, libraries, proxy_path, host)

    @classmethod
    def current(cls) -> LoadedEngine | None:
        """Return what `load` has loaded in this process, if it has."""
        return cls._loaded

    @property
    def proxy(self) -> ct.CDLL:
        """Our proxy library, registered in ggml at first use: until then the engine has only its own devices.

        Raises:
            EngineMismatchError: the library does not load, or ggml refuses it.
        """
        if self._proxy is None:
            with interrupts_deferred(), self._loading_proxy:  # registered once, and kept
                if self._proxy is None:
                    self._proxy = self._load_proxy()
        return self._proxy

    def _load_proxy(self) -> ct.CDLL:
        try:
            proxy = ct.CDLL(str(self._proxy_path))
            declare_proxy(proxy)
        except (OSError, AttributeError) as error:
            raise _does_not_load(self.library_paths[-1], self._proxy_path, error) from error
        if proxy.expertier_proxy_abi() != PROXY_ABI:
            raise _other_interface(self._proxy_path, proxy.expertier_proxy_abi(), PROXY_ABI)
        register = self.symbol("ggml_backend_load", ct.c_void_p, ct.c_char_p)
        if not register(str(self._proxy_path).encode()):
            raise EngineMismatchError(
                f"ggml {self.ggml_version} refused the plugin {self._proxy_path}, which was built for its backend "
                f"interface {proxy.expertier_proxy_api_version()}; run `expertier engine build`"
            )
        return proxy

    @property
    def has_proxy(self) -> bool:
        """Whether `proxy` was used: devices that the engine gets from now on will have no proxy."""
        return self._proxy is not None

    @property
    def api_version(self) -> int:
        """ggml's backend interface version that the proxy was compiled for."""
        return int(self.proxy.expertier_proxy_api_version())

    @property
    def ggml_version(self) -> str:
        """The ggml version that the loaded library reports."""
        return str(self.symbol("ggml_version", ct.c_char_p)().decode())

    def defaults(self) -> dict[str, dict[str, Any]]:
        """Every field of the engine's default parameters, as our host library's headers lay them out."""
        parsed: dict[str, dict[str, Any]] = json.loads(self.host.expertier_host_defaults())
        return parsed

    def devices(self) -> list[dict[str, Any]]:
        """The engine's devices and ours: name, description, free_bytes, total_bytes."""
        parsed: list[dict[str, Any]] = json.loads(self.host.expertier_host_devices())
        return parsed

    def block_size(self, ggml_type: int) -> BlockSize | None:
        """Return the block size of one of the engine's types; None for a type that this build does not have."""
        return block_size(self.host.expertier_host_block_size, ggml_type)

    def take_log(self, level: int = _LOG_WARNING) -> str:
        """Return and clear what the engine logged since the last call, at `level` (ggml_log_level) or above."""
        text = ct.create_string_buffer(1 << 16)
        self.host.expertier_host_take_log(level, text, len(text))
        return text.value.decode(errors="replace")

    def keep_log(self) -> None:
        """Keep what the engine logs for `take_log`. Call this again after code of the engine has redirected its log."""
        self.host.expertier_host_start()

    def stock_devices(self) -> int | None:
        """Address of a list of devices without the proxy devices; None while the proxy is not registered."""
        address: int | None = self.host.expertier_host_stock_devices()
        return address

    def symbol(self, name: str, result: Any, *arguments: Any) -> Any:
        """Return the engine's exported function `name` with this signature."""
        for library in self._libraries:
            try:
                function = getattr(library, name)
            except AttributeError:
                continue
            function.restype = result
            function.argtypes = arguments
            return function
        raise EngineMismatchError(
            f"none of {', '.join(map(str, self.library_paths))} exports {name}: that is not a llama.cpp build; "
            "give the folder of one with `--llama-cpp DIR`, or install the wheel with pip install 'expertier[llama]'"
        )


def _does_not_load(engine: Path, plugin: Path, error: Exception) -> EngineMismatchError:
    return EngineMismatchError(
        f"the engine {engine} and our library {plugin} do not load together: {error}; run `expertier engine build`"
    )


def _other_interface(plugin: Path, found: int, wanted: int) -> EngineMismatchError:
    return EngineMismatchError(
        f"our library {plugin} speaks interface {found}, this expertier speaks {wanted}; run `expertier engine build`"
    )
