"""A limit on the memory of child processes, the page cache of the files that they read included: a control group.

Both versions of Linux's memory controller count the page cache, so a process under the limit has the RAM of a smaller
machine. An out-of-memory kill stays inside the group. Needs the right to make a group below one's own: root where the
controller's first version is mounted; with the second, root or a delegated group whose own processes are in leaves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A control group that holds `n_bytes`; `run` starts a child in it. Removed at the end."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.version = 1 if (_V1 / "memory.limit_in_bytes").exists() else 2
        self._group = _own_group(self.version) / f"expertier-benchmark-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            self._group.mkdir()
            name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            (self._group / name).write_text(str(self.n_bytes))
            if self.version == 2:
                (self._group / "memory.swap.max").write_text("0")
        except OSError as error:
            if self._group.exists():
                self._group.rmdir()
            raise SystemExit(
                f"no control group with a memory limit can be made ({error}); run this as root, or start it as "
                f"`systemd-run --user --scope -p MemoryMax={self.n_bytes} -p MemorySwapMax=0 python {sys.argv[0]} "
                "--limited ...`"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(100):  # a child that has just ended may be in it still
            try:
                self._group.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        print(f"the control group {self._group} could not be removed", file=sys.stderr)

    def run(self, arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the group and return what it printed; ended by -9 where it was killed."""
        script = f'echo $$ > "{self._group}/cgroup.procs" && exec "$@"'
        return _run(["/bin/sh", "-c", script, "sh", *arguments], timeout_s)

    def kills(self) -> int:
        """Return how many processes of the group the kernel has killed for want of memory."""
        file = self._group / ("memory.oom_control" if self.version == 1 else "memory.events")
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields.get("oom_kill", 0))


class NoLimit:
    """Replaces `MemoryLimit` where the benchmark itself runs under a limit, which its children inherit."""

    version = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command and return what it printed."""
        return _run(arguments, timeout_s)

    def kills(self) -> int:
        """Return 0, as the number is not known."""
        return 0


def _run(arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _own_group(version: int) -> Path:
    """Return the folder of this process's group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if version == 1 and "memory" in controllers.split(","):
            return _V1 / path.lstrip("/")
        if version == 2 and controllers == "":
            return _V2 / path.lstrip("/")
    raise SystemExit("this kernel has no memory control groups")
