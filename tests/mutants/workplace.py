"""A copy of the package in which one bug is planted at a time, for suites that run an engine.

Numba's compiled functions are kept by the path of their source, and the plugin by all of its sources: so the copy stays
where it is, compiled functions stay with it, and only a plugin with a bug goes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants.command import ROOT, Outcome, run_command
from mutants.mutant import Mutant

from expertier.added_flags import C_VARIABLE, CPP_VARIABLE

LIMIT_S = 150
FIRST_LIMIT_S = 1800
_CACHE_VARIABLE = "EXPERTIER_CACHE_DIR"
_MAKE_ALL = (
    "from expertier.engine_adapter.open import prepare_engine; prepare_engine(); "
    "from fake_ggml_gpu import build_fake_gpu; build_fake_gpu()"
)


class Workplace:
    """Such a copy, its caches, and the commands that use them."""

    def __init__(self, folder: Path, healthy: Path, objects: Path, compiler: Sequence[str]) -> None:
        """Copy the package; `objects` is where compiled files are kept, for all workplaces."""
        self._package = folder / "package"
        self._cache = folder / "cache"
        shutil.copytree(healthy, self._package)
        self._cache.mkdir()
        wrapper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("object_cache.py"))]
        self._environment = {
            "PYTHONPATH": os.pathsep.join([str(self._package), str(ROOT / "tests" / "support")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(folder / "numba"),
            _CACHE_VARIABLE: str(self._cache),
            # A bug may be a warning, too; the suites have to catch it, and not the compiler.
            C_VARIABLE: "",
            CPP_VARIABLE: "",
            "CXX": shlex.join([*wrapper, str(objects), *compiler]),
        }

    def make_all(self, found: Path | None) -> None:
        """Make the plugin and the fake devices' library, with headers from a cache folder that has them."""
        if found is not None:
            shutil.copytree(found / "headers", self._cache / "headers")
        made = run_command([sys.executable, "-c", _MAKE_ALL], self._environment, FIRST_LIMIT_S)
        if made.failure is not None:
            raise RuntimeError(f"the plugin without a bug cannot be made: {made.output}")

    def share_caches(self, other: Workplace) -> None:
        """Have what the other one has made."""
        shutil.copytree(other._cache, self._cache, dirs_exist_ok=True)

    def run(self, suites: Sequence[str], limit_s: float) -> Outcome:
        """Run suites but for what is deep, until one fails."""
        options = ["-q", "-x", "-m", "not deep", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *(str(ROOT / suite) for suite in suites)]
        return run_command(command, self._environment, limit_s)

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Run a mutant's suites with it planted; a plugin with a bug is removed."""
        plugins = self._cache / "plugins"
        healthy = set(plugins.iterdir())
        try:
            with mutant.planted(self._package / mutant.installed_file):
                return self.run(mutant.suites, LIMIT_S)
        finally:
            for folder in set(plugins.iterdir()) - healthy:
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


def headers_found() -> Path | None:
    """Return a cache folder in which the engine's headers are already, so that they are not fetched again."""
    named = os.environ.get(_CACHE_VARIABLE)
    for folder in ([Path(named)] if named else []) + [ROOT / ".pytest_cache" / "d" / "expertier"]:
        if (folder / "headers").is_dir():
            return folder
    return None
