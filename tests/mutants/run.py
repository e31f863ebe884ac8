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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.catalogue import MUTANTS  # noqa: E402
from mutants.command import run_command  # noqa: E402
from mutants.engine_catalogue import ENGINE_MUTANTS  # noqa: E402
from mutants.mutant import MACHINE, Mutant  # noqa: E402
from mutants.workplace import FIRST_LIMIT_S, Workplace, headers_found  # noqa: E402

PACKAGES = {
    "": "src/expertier",
    "tiers": "tiers",
    "planner": "planner",
    "hip": "hip",
    "engine_adapter": "engine_adapter",
}
LIMIT_S = 600
DOES_NOT_COMPILE = "the plugin could not be compiled"
NO_SUCH_TEST = (4, 5)  # exit statuses of pytest


@dataclass(frozen=True)
class Result:
    """How a suite took a bug: what it said, None where it passed; `doubt`, why it proves nothing."""

    suite: str
    said: str | None
    seconds: float
    doubt: str = ""

    @property
    def is_caught(self) -> bool:
        """Whether the suite noticed the bug, and not something else."""
        return self.said is not None and not self.doubt


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
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_DISABLE_JIT": "1",  # a bug in the policy would have to be compiled first
    }
    outcome = run_command(command, environment, LIMIT_S)
    return Result(suite, outcome.failure, outcome.seconds)


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


def try_engine_mutant(mutant: Mutant, free: Queue[Workplace]) -> Result:
    """Plant a bug in a workplace that nobody uses, and run its suites."""
    workplace = free.get()  # no limit: as many threads as workplaces, and each run has one
    try:
        outcome = workplace.try_mutant(mutant)
    finally:
        free.put(workplace)
    doubt = ""
    if DOES_NOT_COMPILE in outcome.output:
        doubt = "it does not compile"
    elif outcome.status in NO_SUCH_TEST:
        doubt = "there is no such test"
    elif outcome.is_late and not mutant.may_hang:
        doubt = "too slow to tell"
    return Result(mutant.suites[0], outcome.failure, outcome.seconds, doubt)


def without_a_bug(healthy: Path, suites: Iterable[str], n_examples: int) -> list[Result]:
    """Run all suites on the package as it is; return those that fail, which prove nothing."""
    results = [run_suite(suite, healthy, n_examples) for suite in suites]
    return [result for result in results if result.said is not None]


@contextmanager
def workplaces(healthy: Path, n: int) -> Iterator[list[Workplace]]:
    """So many workplaces with the plugin made; they go at the end, as do their caches."""
    from expertier.engine_adapter.build.compiler import find_compiler

    with tempfile.TemporaryDirectory(prefix="workplaces-") as name:
        objects = Path(name) / "objects"
        objects.mkdir()
        made = []
        for i in range(n):
            folder = Path(name) / str(i)
            folder.mkdir()
            made.append(Workplace(folder, healthy, objects, find_compiler().command))
        made[0].make_all(headers_found())
        for other in made[1:]:
            other.share_caches(made[0])
        yield made


def engine_without_a_bug(free: Queue[Workplace], suites: Iterable[str]) -> list[Result]:
    """The same for suites that run an engine, together, in a workplace that nobody uses."""
    workplace = free.get()  # no limit: as many threads as workplaces, and each run has one
    try:
        outcome = workplace.run(sorted(suites), FIRST_LIMIT_S)
    finally:
        free.put(workplace)
    return [] if outcome.failure is None else [Result("one with an engine", outcome.failure, outcome.seconds)]


def require_copy_is_used(package: Path) -> None:
    """Raise unless Python imports the copy: otherwise all would be missed, or caught for another reason."""
    ask = [sys.executable, "-c", "import expertier.tiers.manager as m; print(m.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        ask, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
    if not Path(found.strip()).is_relative_to(package):
        raise RuntimeError(f"the package is imported from {found.strip()}, not from its copy in {package}")


def suites_of(mutants: Iterable[Mutant]) -> list[str]:
    """Return the suites of mutants, each once."""
    return sorted({suite for mutant in mutants for suite in mutant.suites})


class Table:
    """What is printed, a line a mutant."""

    def __init__(self, mutants: Iterable[Mutant]) -> None:
        """Make it wide enough for the names."""
        self._width = max((len(mutant.name) for mutant in mutants), default=0)
        self.n_caught = self.n_missed = self.n_broken = 0

    def add(self, mutant: Mutant, result: Result) -> None:
        """Print what came of a mutant."""
        self.n_caught += result.is_caught
        self.n_missed += not result.is_caught
        outcome = f"{result.suite}: {result.said}" if result.is_caught else f"MISSED {result.doubt}"
        print(f"{mutant.name:{self._width}}  {result.seconds:5.1f} s  {outcome[:250]}", flush=True)

    def add_broken(self, results: Iterable[Result]) -> None:
        """Print which suites fail without a bug."""
        for result in results:
            self.n_broken += 1
            print(f"without a bug {result.suite} fails, and so proves nothing: {result.said}", flush=True)


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="examples of the machine for each bug")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="run the mutants whose name contains this")
    options = parser.parse_args()
    chosen = [mutant for mutant in (*MUTANTS, *ENGINE_MUTANTS) if options.only in mutant.name]
    of_tiers = [mutant for mutant in chosen if not mutant.needs_engine]
    of_engine = [mutant for mutant in chosen if mutant.needs_engine]
    table = Table(chosen)
    with tempfile.TemporaryDirectory(prefix="healthy-") as name, ThreadPoolExecutor(options.jobs) as threads:
        healthy = copy_package(Path(name))
        require_copy_is_used(healthy)
        for mutant in chosen:
            with tempfile.TemporaryDirectory(prefix="mutant-") as there:
                mutant.plant(
                    Path(shutil.copy(healthy / mutant.installed_file, there))
                )  # or complains at once
        baseline = threads.submit(without_a_bug, healthy, suites_of(of_tiers), options.examples)
        results = [threads.submit(try_mutant, mutant, healthy, options.examples) for mutant in of_tiers]
        table.add_broken(baseline.result())  # no limit: each of its suites has one
        for mutant, future in zip(of_tiers, results, strict=True):
            table.add(mutant, future.result())  # no limit: each of its suites has one
        if of_engine:
            with workplaces(healthy, min(options.jobs, len(of_engine))) as made:
                free: Queue[Workplace] = Queue()
                for workplace in made:
                    free.put(workplace)
                baseline = threads.submit(engine_without_a_bug, free, suites_of(of_engine))
                results = [threads.submit(try_engine_mutant, mutant, free) for mutant in of_engine]
                table.add_broken(baseline.result())  # no limit: its suites have one
                for mutant, future in zip(of_engine, results, strict=True):
                    table.add(mutant, future.result())  # no limit: each of its suites has one
    print(f"mutants: {table.n_caught} caught, {table.n_missed} missed")
    return 1 if table.n_missed or table.n_broken else 0


if __name__ == "__main__":
    sys.exit(main())
