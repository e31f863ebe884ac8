"""The inference engine that is installed on this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from expertier.engine_adapter.build.pins import EnginePin

REMEDY = (
    "reinstall the pinned pair (pip install --force-reinstall 'expertier[llama]'), or build the plugin for a "
    "llama.cpp of yours (expertier engine build --llama-cpp DIR)"
)
"""What to do where engine and plugin do not fit together; messages about that end with it."""


GPU_BACKENDS = ("cuda", "hip", "musa", "sycl", "vulkan")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's libraries and what they belong to: an installed wheel, or the user's llama.cpp folder."""

    package: str
    """The wheel's package, or "llama.cpp" for a folder."""
    version: str
    """The package's version, or the version of ggml in the folder's source."""
    libraries: tuple[Path, ...]
    """The libraries, loaded with RTLD_GLOBAL in this order: a dependency comes before the library that uses it."""
    library_sha256: str
    """The hash of the wheel's one library, or of all libraries of a folder."""
    pin: EnginePin | None = None
    """The pin of this package and version, if there is one."""
    source: Path | None = None
    """The user's folder, whose headers are used; with None, the pin's headers are used."""

    @property
    def pinned_sha256(self) -> str | None:
        """Return the hash that the pin records for this machine's library, None where it records none."""
        return self.pin.library_sha256.get(platform.machine()) if self.pin else None

    @property
    def is_pinned(self) -> bool:
        """Whether the library is, byte for byte, the one that the pin names."""
        return self.library_sha256 == self.pinned_sha256

    @property
    def has_gpu_backends(self) -> bool:
        """Whether GPU backends lie beside the libraries; a backend that is linked into a library is not found."""
        beside = {path.name for library in self.libraries for path in library.parent.glob("libggml-*.so*")}
        return any(name.startswith(tuple(f"libggml-{kind}" for kind in GPU_BACKENDS)) for name in beside)

    @property
    def remedy(self) -> str:
        """Return what to do where this engine and the plugin do not fit together."""
        if self.pin is not None and self.pin.compiled_at_install:
            return (
                f"compile it anew: pip install --force-reinstall --no-cache-dir --no-binary {self.package} "
                f"'{self.pin.requirement}'"
            )
        return REMEDY

    def __str__(self) -> str:
        """Name the engine for a message."""
        where = self.source or self.libraries[-1]
        return f"{self.package} {self.version} ({where})"
