"""Hypothesis profiles: the default one for `make test`, and `deep` for `make test-deep`; limits; a clean start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from numba.core.config import reload_config

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.tiers.host_pool.budget import process_budget
from limits.time_limits import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_runtest_protocol,
    pytest_unconfigure,
)
from limits.time_limits import pytest_configure as configure_limits
from servers.warm_commands import WarmCommands
from strict_flags import make_strict

settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled functions between runs, whatever cache folder a test gives to a command: all take half a minute."""
    configure_limits()
    make_strict()
    if config.pluginmanager.hasplugin("cacheprovider"):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(config.cache.mkdir("numba")))
    reload_config()  # a filter of warnings has imported Numba already


@pytest.fixture(scope="session")
def cache_folder(request: pytest.FixtureRequest) -> str:
    """The folder of headers, plugins and other builds, kept between runs: EXPERTIER_CACHE_DIR, or a folder of pytest's.

    A test that starts a process sets the variable for it: else the process builds its plugin in the user's own folder.
    """
    return os.environ.get(CACHE_VARIABLE) or str(request.config.cache.mkdir("expertier"))


@pytest.fixture(scope="session")
def warm_commands(cache_folder: str) -> Iterator[WarmCommands]:
    """A process that has imported the command line, for tests of commands."""
    with ExitStack() as ending:
        yield WarmCommands(ending, {**os.environ, CACHE_VARIABLE: cache_folder})


@pytest.fixture(autouse=True)
def _own_host_budget() -> None:
    """Give each test a budget of its own: pools that an earlier test left open would take part of it."""
    process_budget.cache_clear()


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """Undo what a test did to the level of our log, as the state machines do: others read it."""
    logger = logging.getLogger("expertier")
    before = logger.level
    yield
    logger.setLevel(before)
