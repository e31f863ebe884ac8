"""The lowest versions that pyproject.toml allows: each was tried, by installing them all and using the front door."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
NOT_HERE = {
    "cuda": "a GPU's libraries",
    "rocm": "a GPU's libraries",
    "llama-cpp-python": "pip compiles an engine for it, which is not for one process with the other",
    "fuzz": "not part of the tests",
    "tidy": "checks C++ without running it",
}
"""Extras that are not installed, and why."""

TESTS = (
    "tests/test_front_door.py",
    "tests/cli",
    "tests/tiers/model/test_table.py",
    "tests/planner/policy/test_interpreted.py",
)
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src", "tiers", "planner", "hip", "engine_adapter")
_LIMIT_S = 1800
_VERSIONS = """
import importlib.metadata, json, re
found = importlib.metadata.distributions()
print(json.dumps({re.sub("[-_.]+", "-", each.name).lower(): each.version for each in found}))
"""


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def extras() -> list[str]:
    return [name for name in project()["project"]["optional-dependencies"] if name not in NOT_HERE]


def requirements() -> Iterator[Requirement]:
    found = project()
    yield from map(Requirement, found["build-system"]["requires"])
    yield from map(Requirement, found["project"]["dependencies"])
    for name in extras():
        yield from map(Requirement, found["project"]["optional-dependencies"][name])


def lowest() -> dict[str, str]:
    """The lowest allowed version of each requirement that has one."""
    return {
        each.name: bound.version
        for each in requirements()
        for bound in each.specifier
        if bound.operator in (">=", "==")
    }


def test_every_requirement_at_run_time_has_a_lowest_version() -> None:
    assert {each.name for each in requirements()} - set(lowest()) == {
        "types-psutil"
    }  # follows psutil by itself


@pytest.mark.deep
def test_the_front_door_works_with_the_lowest_versions(tmp_path: Path, cache_folder: str) -> None:
    bounds = lowest()
    constraints = tmp_path / "lowest.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in bounds.items()))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environ = {**os.environ, "PIP_CONSTRAINT": str(constraints), "EXPERTIER_CACHE_DIR": cache_folder}
    environ.pop("PYTHONPATH", None)
    source = tmp_path / "source"  # a copy: pip builds where the source is, and leaves things there
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    run([python, "-m", "pip", "install", "-q", f"{source}[{','.join(extras())}]"], environ)
    installed = json.loads(run([python, "-c", _VERSIONS], environ))
    for name, version in bounds.items():
        if name != "setuptools":  # that one built the package
            assert Version(installed[canonicalize_name(name)]) == Version(version), name
    # What else these versions warn of, beside today's versions of what they need, is not ours to mend.
    run([python, "-m", "pytest", "-q", "-m", "not deep", "-W", "ignore::DeprecationWarning", *TESTS], environ)


def run(command: list[object], environ: dict[str, str]) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout
