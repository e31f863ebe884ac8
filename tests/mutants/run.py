"""`make test-mutants`: plants one bug at a time in a copy of the package, and sees that the suites notice.

The tree itself is never changed. Prints a table, and last `mutants: N caught, 0 missed`; the exit status is 1
when one was missed, when a mutant's text is not in its file any more, or when the package without a bug fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.catalogue import MUTANTS  # noqa: E402
from mutants.mutant import MACHINE, Mutant  # noqa: E402

PACKAGES = {
    "": "src/expertier",
    "tiers": "tiers",
    "planner": "planner",
    "hip": "hip",
    "engine_adapter": "engine_adapter",
}
LIMIT_S = 600


@dataclass(frozen=True)
class Result:
    """How a suite took a bug: what it said, None where it passed."""

    suite: str
    said: str | None
    seconds: float


def copy_package(folder: Path) -> Path:
    """Copy the package as it is installed into a folder for PYTHONPATH, and return the folder."""
    for inside, source in PACKAGES.items():
        shutil.copytree(
            ROOT / source,
            folder / "expertier" / inside,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    return folder


def run_suite(suite: str, package: Path, n_examples: int) -> Result:
    """Run one suite on a copy of the package."""
    here = Path(__file__).parent
    if suite == MACHINE:
        command = [sys.executable, str(here / "machine_run.py"), str(n_examples)]
    else:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(ROOT / suite)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_DISABLE_JIT": "1",  # a bug in the policy would have to be compiled first
    }
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        said = None if done.returncode == 0 else reason(done.stdout + done.stderr)
    except subprocess.TimeoutExpired:
        said = f"nothing within {LIMIT_S} s"
    return Result(suite, said, time.monotonic() - start)


def reason(output: str) -> str:
    """Return the line that says what was wrong."""
    if "Timeout (" in output:
        return "a wait for ever"
    lines = output.splitlines()
    of_pytest = [line[1:].strip() for line in lines if line.startswith("E  ")]
    errors = [line.strip(" |") for line in lines if "Error: " in line and "File " not in line]
    return (of_pytest or errors or [line for line in lines if line.strip()] or ["failed"])[0]


def try_mutant(mutant: Mutant, healthy: Path, n_examples: int) -> Result:
    """Plant a bug in a copy of `healthy`, and run its suites until one notices."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        package = Path(shutil.copytree(healthy, name, dirs_exist_ok=True))
        mutant.plant(package / mutant.installed_file)
        result = Result("", None, 0.0)
        for suite in mutant.suites:
            result = run_suite(suite, package, n_examples)
            if result.said is not None:
                return result
    return result


def without_a_bug(healthy: Path, suites: Iterable[str], n_examples: int) -> list[Result]:
    """Run all suites on the package as it is; return those that fail, which prove nothing."""
    results = [run_suite(suite, healthy, n_examples) for suite in suites]
    return [result for result in results if result.said is not None]


def require_copy_is_used(package: Path) -> None:
    """Raise unless Python imports the copy: otherwise all would be missed, or caught for another reason."""
    ask = [sys.executable, "-c", "import expertier.tiers.manager as m; print(m.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        ask, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
    if not Path(found.strip()).is_relative_to(package):
        raise RuntimeError(f"the package is imported from {found.strip()}, not from its copy in {package}")


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="examples of the machine for each bug")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="run the mutants whose name contains this")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    suites = sorted({suite for mutant in chosen for suite in mutant.suites})
    missed = 0
    width = max(len(mutant.name) for mutant in chosen)
    with tempfile.TemporaryDirectory(prefix="healthy-") as name, ThreadPoolExecutor(options.jobs) as threads:
        healthy = copy_package(Path(name))
        require_copy_is_used(healthy)
        for mutant in chosen:
            with tempfile.TemporaryDirectory(prefix="mutant-") as there:
                mutant.plant(
                    Path(shutil.copy(healthy / mutant.installed_file, there))
                )  # or complains at once
        baseline = threads.submit(without_a_bug, healthy, suites, options.examples)
        results = [threads.submit(try_mutant, mutant, healthy, options.examples) for mutant in chosen]
        broken = baseline.result()  # no limit: each of its suites has one
        for result in broken:
            print(f"without a bug {result.suite} fails, and so proves nothing: {result.said}")
        for mutant, future in zip(chosen, results, strict=True):
            result = future.result()  # no limit: each of its suites has one
            missed += result.said is None
            outcome = f"{result.suite}: {result.said}" if result.said is not None else "MISSED"
            print(f"{mutant.name:{width}}  {result.seconds:5.1f} s  {outcome[:150]}", flush=True)
    print(f"mutants: {len(chosen) - missed} caught, {missed} missed")
    return 1 if missed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
