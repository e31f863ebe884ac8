"""Runs the command line as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.plugin import ensure_plugin
from expertier.engine_adapter.models.synth import TINY_SHAPE, write_model
from servers.commands import Ended
from servers.warm_commands import WarmCommands


@pytest.fixture(scope="session")
def ready_cache(cache_folder: str) -> str:
    """A cache folder in which the plugin is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPERTIER_CACHE_DIR", cache_folder)
        ensure_plugin(find_engine())
    return cache_folder


@pytest.fixture
def expertier(ready_cache: str, warm_commands: WarmCommands) -> Callable[..., Ended]:
    """Run `expertier ARGUMENTS`; `env` adds variables, `code` runs Python first in the same process.

    `fresh` imports everything anew. Variables in `env` that are not the tiers' own do the same, as a module may read
    one when it is imported.
    """

    def run(
        *arguments: object, env: dict[str, str] | None = None, code: str = "", fresh: bool | None = None
    ) -> Ended:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
        environment = {**inherited, "EXPERTIER_CACHE_DIR": ready_cache, "NO_COLOR": "1", **(env or {})}
        if fresh is None:
            fresh = not all(name.startswith("MOE_") for name in env or {})
        if not fresh:
            return Ended(*warm_commands.run([*map(str, arguments)], environment, code))
        child = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{code}\nimport sys\nfrom expertier.cli.app import main\nsys.argv[0] = 'expertier'\nmain()",
                *map(str, arguments),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Ended(child.returncode, child.stdout, child.stderr)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that the engine runs."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", TINY_SHAPE)
