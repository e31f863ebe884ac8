"""The record that a build writes about itself, `build.json`, beside its libraries."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from expertier.engine_adapter.build.defaults import Defaults

FILE_NAME = "build.json"


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """The engine, headers, compiler and checks of one built plugin."""

    package: str
    version: str
    engine_libraries: tuple[str, ...]
    library_sha256: str
    headers: str
    """Identifies the headers: the hash of the pinned source package, or of the headers in the user's folder."""
    api_version: int
    ggml_version: str
    defaults: Defaults
    devices: tuple[str, ...] | None
    """The engine's devices as the self-test saw them; None when the self-test did not say."""
    sources: str
    """The hash over the plugin's C++ sources."""
    compiler: str
    flags: str
    proxy_sha256: str
    host_sha256: str

    def write(self, folder: Path) -> None:
        """Write the file into `folder`."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> BuildInfo | None:
        """Return the record in `folder`; None when there is none that can be read."""
        try:
            fields = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
            devices = fields.pop("devices")
            return cls(
                engine_libraries=tuple(fields.pop("engine_libraries")),
                devices=None if devices is None else tuple(devices),
                **fields,
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
