"""The packages that pyproject.toml names are those that the folders hold: none is forgotten when it is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_with_code_is_a_package_that_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = set()
    for package, folder in setuptools["package-dir"].items():
        for path in (ROOT / folder).rglob("__init__.py"):
            inside = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inside)))
    assert set(setuptools["packages"]) == found


def test_every_folder_of_modules_has_an_init() -> None:
    for folder in ("tiers", "planner", "hip", "engine_adapter", "src/expertier"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path
