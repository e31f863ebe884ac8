"""`make sanitize`: the plugin and the fake GPUs under sanitizers, with tests that drive them.

    address   AddressSanitizer and UndefinedBehaviorSanitizer
    thread    ThreadSanitizer

For each, the plugin and the fakes are compiled with the sanitizer into `build/sanitize`, and Python runs with the
sanitizer's library before all others. First a planted bug of each kind must be reported (planted.cpp); then the suites
must pass without a report, from whatever process. Reports are printed and stay in `build/sanitize/KIND/reports`.

The engine's own library and Python are not compiled with a sanitizer: what they do is not checked, their locks count.
UndefinedBehaviorSanitizer writes to standard error and aborts the process, which fails the test that needs it.
Python frees little at its end, so leaks are not looked for; the fakes count what is left on a device.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertier.added_flags import C_VARIABLE, CPP_VARIABLE
from expertier.engine_adapter.build.cache import CACHE_VARIABLE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "sanitize"
LIMIT_S = 1800
PLANTED_LIMIT_S = 300

_GPU = "tests/engine_adapter/gpu_engine"
SUITES = (
    f"{_GPU}/test_gpu_device_lookup.py",
    f"{_GPU}/test_captured_graphs.py",
    f"{_GPU}/test_gpu_prefetch.py",
    f"{_GPU}/test_gpu_contexts.py",
    f"{_GPU}/slab",
    f"{_GPU}/split/test_layer_split_lookups.py",
    "tests/engine_adapter/ggml_proxy/test_expert_graphs.py",
    "tests/engine_adapter/ggml_proxy/test_deferred.py",
)


# The fake runs a kernel's threads as fibers; ASan says once a process that it may then be wrong. So far it was not.
_NOT_A_REPORT = re.compile(r"==\d+==WARNING: ASan doesn't fully support makecontext/swapcontext.*\n?")


@dataclass(frozen=True)
class Sanitizer:
    """Flags, libraries and options of a kind, and what a report of each planted bug must contain."""

    flags: str
    libraries: tuple[str, ...]
    options: dict[str, str]
    planted: dict[str, str]


SANITIZERS = {
    "address": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        ("libasan.so", "libubsan.so"),
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1 abort_on_error=1"},
        {
            "heap_overflow": "AddressSanitizer: heap-buffer-overflow",
            "integer_overflow": "runtime error: signed integer overflow",
        },
    ),
    # Accesses by code that is not compiled with it are not looked at: it knows nothing of that code's atomics.
    "thread": Sanitizer(
        "-fsanitize=thread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 history_size=4"},
        {"race": "ThreadSanitizer: data race"},
    ),
}


class Run:
    """The environment of one kind, and where its reports are."""

    def __init__(self, kind: str) -> None:
        """Make the folders, with headers from another cache where they are there."""
        self.sanitizer = SANITIZERS[kind]
        self.folder = WORK / kind
        self.reports = self.folder / "reports"
        cache = self.folder / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        found = ROOT / ".pytest_cache" / "d" / "expertier" / "headers"
        if found.is_dir() and not (cache / "headers").exists():
            shutil.copytree(found, cache / "headers")
        compilers = {name: os.environ.get(name) or usual for name, usual in (("CC", "cc"), ("CXX", "c++"))}
        flags = f"{self.sanitizer.flags} -g -fno-omit-frame-pointer"
        self.environment = {
            **os.environ,
            # Compilers run without the sanitizer's library.
            **{name: f"env -u LD_PRELOAD {command}" for name, command in compilers.items()},
            C_VARIABLE: flags,
            CPP_VARIABLE: flags,
            CACHE_VARIABLE: str(cache),
            "PYTHONPATH": str(ROOT / "tests" / "support"),
            "LD_PRELOAD": " ".join(_library(compilers["CXX"], name) for name in self.sanitizer.libraries),
            **{
                name: f"{options} log_path={self.reports}/report"
                for name, options in self.sanitizer.options.items()
            },
        }

    def run(self, command: Sequence[str], limit_s: float, *, captures: bool = False) -> tuple[int, str]:
        """Run a command; return its status, and the reports, with standard error where that is captured."""
        shutil.rmtree(self.reports, ignore_errors=True)
        self.reports.mkdir()
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=self.environment,
            timeout=limit_s,
            check=False,
            text=True,
            stderr=subprocess.PIPE if captures else None,
        )
        texts = [done.stderr or ""]
        texts += [
            _NOT_A_REPORT.sub("", path.read_text(errors="replace")) for path in sorted(self.reports.iterdir())
        ]
        return done.returncode, "\n".join(filter(None, texts))


def _library(compiler: str, name: str) -> str:
    """Return where the compiler has a sanitizer's library."""
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(
            f"{compiler} has no {name}: install GCC's sanitizer libraries, or set CXX to a g++ that has them"
        )
    return path


def check(kind: str, options: Sequence[str]) -> list[str]:
    """Run one kind; return what is wrong."""
    run = Run(kind)
    for bug, expected in run.sanitizer.planted.items():
        _, report = run.run([str(HERE / "planted.py"), bug], PLANTED_LIMIT_S, captures=True)
        if expected not in report:
            return [f"{kind}: a planted bug, {bug}, was not reported: {report!r}"]
        print(f"{kind}: a planted {bug} is reported", flush=True)
    status, report = run.run(
        ["-m", "pytest", "-q", "-m", "not deep", "-n", "2", "--dist", "worksteal", *options], LIMIT_S
    )
    print(report, flush=True)
    problems = [f"{kind}: reports are in {run.reports}"] if report else []
    return problems + ([f"{kind}: the tests ended with status {status}"] if status else [])


def main() -> int:
    """Run the kinds that are asked for, or both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kind", action="append", choices=list(SANITIZERS), help="may be repeated; both by default"
    )
    parser.add_argument(
        "suites", nargs="*", default=list(SUITES), help="tests to run instead of the usual ones"
    )
    given = parser.parse_args()
    problems = []
    for kind in given.kind or list(SANITIZERS):
        begun = time.monotonic()
        problems += check(kind, given.suites)
        print(f"{kind}: {time.monotonic() - begun:.0f} s", flush=True)
    print("\n".join(problems) or "sanitize: nothing to report")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
