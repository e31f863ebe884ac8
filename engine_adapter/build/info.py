"""The output of `expertier engine info`: the engine, its pin, the plugin and the tools, even where some are missing."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from expertier.engine_adapter.build.cache import cache_folder
from expertier.engine_adapter.build.compiler import Compiler, list_compilers
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.header_root import read_api_version, read_ggml_version
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.plugin import Plugin, find_plugin, require_pinned
from expertier.errors import BuildError, EngineError


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The state of the engine and its plugin on this machine; a field is None where its subject is missing."""

    package: str | None
    version: str | None
    libraries: tuple[str, ...]
    library_sha256: str | None
    pinned: bool
    ggml_version: str | None
    api_version: int | None
    plugin_proxy: str | None
    plugin_host: str | None
    plugin_tested: bool
    devices: tuple[str, ...] | None
    compiler: str | None
    cache_folder: str
    problem: str | None
    """What keeps the engine from being used, as a text for a person."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields for a JSON document."""
        return dataclasses.asdict(self)


def engine_info(llama_cpp: str | os.PathLike[str] | None = None) -> EngineInfo:
    """Look at the wheel, or at the llama.cpp folder, and at the plugin for it; nothing is built or loaded."""
    problems: list[str] = []
    compiler: Compiler | None = None
    engine: Engine | None = None
    plugin: Plugin | None = None
    try:
        compiler = next(list_compilers(), None)
    except BuildError as error:
        problems.append(str(error))
    try:
        engine = find_engine(llama_cpp)
        require_pinned(engine)
        plugin = find_plugin(engine)
    except EngineError as error:
        problems.append(str(error))
    return EngineInfo(
        package=engine.package if engine else None,
        version=engine.version if engine else None,
        libraries=tuple(map(str, engine.libraries)) if engine else (),
        library_sha256=engine.library_sha256 if engine else None,
        pinned=engine is not None and engine.is_pinned,
        ggml_version=_ggml_version(engine, plugin),
        api_version=_api_version(engine, plugin),
        plugin_proxy=str(plugin.proxy_path) if plugin else None,
        plugin_host=str(plugin.host_path) if plugin else None,
        plugin_tested=plugin is not None,
        devices=plugin.info.devices if plugin else None,
        compiler=str(compiler) if compiler else None,
        cache_folder=str(cache_folder()),
        problem="\n".join(problems) or None,
    )


def _ggml_version(engine: Engine | None, plugin: Plugin | None) -> str | None:
    """Return what the self-test found, or what the pin or the folder says."""
    if plugin is not None:
        return plugin.info.ggml_version
    if engine is None:
        return None
    if engine.source is not None:
        return read_ggml_version(engine.source)
    return engine.pin.ggml_version if engine.pin and engine.is_pinned else None


def _api_version(engine: Engine | None, plugin: Plugin | None) -> int | None:
    """Return what the plugin was built with, or what the pin or the folder says."""
    if plugin is not None:
        return plugin.info.api_version
    if engine is None:
        return None
    if engine.source is not None:
        try:
            return read_api_version(engine.source)
        except EngineError:
            return None
    return engine.pin.api_version if engine.pin and engine.is_pinned else None
