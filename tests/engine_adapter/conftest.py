"""Fixtures for everything that needs the engine for real: one cache folder for the whole test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.plugin import Plugin, ensure_plugin
from expertier.engine_adapter.llama_cpp import LoadedEngine


@pytest.fixture(scope="session")
def engine_cache(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cache folder with the real headers and plugin, kept between runs: EXPERTIER_CACHE_DIR, or pytest's."""
    folder = os.environ.get(CACHE_VARIABLE) or str(request.config.cache.mkdir("expertier"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, folder)
        yield Path(folder)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The installed engine wheel."""
    return find_engine()


@pytest.fixture(scope="session")
def plugin(engine: Engine, engine_cache: Path) -> Plugin:
    """The plugin for the installed engine, built the first time."""
    assert engine_cache
    return ensure_plugin(engine)


@pytest.fixture(scope="session")
def loaded_engine(engine: Engine, plugin: Plugin) -> LoadedEngine:
    """The engine with our plugin, loaded into this process."""
    return LoadedEngine.load(engine.libraries, plugin.proxy_path, plugin.host_path)
