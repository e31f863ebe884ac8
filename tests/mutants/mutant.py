"""A planted bug."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MACHINE = "machine"
"""The suite that is `expertier.testing.tier_machine`; any other is a path for pytest, or a test in one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` in `file`, where it must stand exactly once, becomes `new`; one of `suites` must notice.

    `file` is the path in the repository. A test that does not end in time has noticed only where the bug `may_hang`:
    otherwise the machine may have been busy.
    """

    name: str
    file: str
    old: str
    new: str
    suites: tuple[str, ...] = (MACHINE,)
    may_hang: bool = False

    @property
    def installed_file(self) -> Path:
        """Where the file is in the package: the folders of the repository lie under `expertier`."""
        return Path("expertier") / self.file

    @property
    def needs_engine(self) -> bool:
        """Whether its suites run an engine, and so a plugin that has to be compiled and compiled policies."""
        return self.file.startswith("engine_adapter/")

    def plant(self, path: Path) -> None:
        """Change a copy of the file. Raises `ValueError` where the text is not there once."""
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: its text stands {text.count(self.old)} times in {self.file}: "
                "bring the mutant up to date"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    @contextmanager
    def planted(self, path: Path) -> Iterator[None]:
        """Have the bug in a copy of the file inside of the block."""
        healthy = path.read_bytes()
        self.plant(path)
        try:
            yield
        finally:
            path.write_bytes(healthy)
