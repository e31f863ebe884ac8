"""What was measured so far, in one JSON file that is complete after every measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Results:
    """A file of findings by section and name. One process writes it."""

    def __init__(self, path: Path) -> None:
        """Read what is there; `path`'s folder must exist."""
        self.path = path
        self.document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, section: str, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Return the findings with the same settings that did not fail; None where there are none."""
        found: dict[str, Any] | None = self.document.get(section, {}).get(name)
        if found is None or "failed" in found or found.get("settings") != settings:
            return None
        return found

    def put(self, section: str, name: str, settings: dict[str, Any], findings: dict[str, Any]) -> None:
        """Keep findings, in the place of earlier ones of that name."""
        self.document.setdefault(section, {})[name] = {**findings, "settings": settings}
        self.write()

    def note(self, name: str, value: Any) -> None:
        """Keep something about the run as a whole."""
        self.document[name] = value
        self.write()

    def write(self) -> None:
        """Write the file completely or not at all."""
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.document, indent=1))
        fresh.replace(self.path)
