"""The engine releases that expertier is made for, as data.

Headers and library must be of one commit, and neither a version number nor a commit string tells two commits
apart: so a pin names the package, the version and the hashes of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from expertier.engine_adapter.build.defaults import Defaults
from expertier.engine_adapter.build.recorded_defaults import (
    LLAMA_CPP_PYTHON_0_3_36,
    XLLAMACPP_2026_10_11549,
)

SUPPORTED_API_VERSIONS = (2, 3)
"""Values of GGML_BACKEND_API_VERSION that the plugin's source compiles against."""


@dataclass(frozen=True, slots=True)
class EnginePin:
    """One release: where its headers come from, and which library they belong to."""

    package: str
    version: str
    source_sha256: str
    """The hash of the source package (.tar.gz) that the index serves for exactly this package and version."""
    header_root: str
    """The folder with include/ and ggml/ inside the source package, below its top folder."""
    ggml_version: str
    api_version: int
    library: str | None = None
    """The engine library's path below site-packages; None where only the package that loads it knows the path."""
    library_sha256: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The library's hash by machine, as `platform.machine()` names it."""
    defaults: Defaults = field(default_factory=lambda: MappingProxyType({}))
    compiled_at_install: bool = False
    """Whether the library is compiled where it is installed, so that its hash is not known in advance."""

    @property
    def requirement(self) -> str:
        """Return what pip is asked for."""
        return f"{self.package}=={self.version}"


XLLAMACPP = EnginePin(
    package="xllamacpp",
    version="2026.10.11549",
    source_sha256="c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b",
    header_root="thirdparty/llama.cpp",
    ggml_version="0.26.0",
    api_version=3,
    library="xllamacpp/xllamacpp.abi3.so",
    library_sha256=MappingProxyType(
        {
            "x86_64": "78dcbbfcc861ee3377554325dc12864829a76ec3de6f1882886d4a82a2def7f5",
            "aarch64": "d217f8da7094890dffa84ce3be7c88fa021e6e6e54f64f49d165df886ec62ed8",
        }
    ),
    defaults=XLLAMACPP_2026_10_11549,
)
"""The default engine: one wheel with a static llama.cpp in it."""

LLAMA_CPP_PYTHON = EnginePin(
    package="llama-cpp-python",
    version="0.3.36",
    source_sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    header_root="vendor/llama.cpp",
    ggml_version="0.25.3",
    api_version=2,
    defaults=LLAMA_CPP_PYTHON_0_3_36,
    compiled_at_install=True,
)
"""The engine of `llama_cpp.Llama`, which pip compiles from the source package that also holds the headers."""
