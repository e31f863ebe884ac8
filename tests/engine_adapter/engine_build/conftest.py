"""A toy engine, toy sources and a toy compiler, so that the build's logic is tested in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.locate import find_folder
from expertier.engine_adapter.build.selftest_run import SelftestReport

_TOY_COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
for word in "$@"; do
    last="$word"
    [ "$word" = --version ] && echo "toy 1.0 (tests)" && exit 0
done
[ "$last" = - ] && exit 0
[ -e "{folder}/fail" ] && {{ echo "toy.cpp:1: error: the toy compiler was told to fail"; exit 1; }}
echo "built by: $@" > "$last"
"""
_TOY_VERSION = """
set(GGML_VERSION_MAJOR 0)
set(GGML_VERSION_MINOR 26)
set(GGML_VERSION_PATCH 0)
"""


class ToyCompiler:
    """A shell script called c++ that writes its arguments into the file that it was asked to make."""

    def __init__(self, folder: Path) -> None:
        """Write the script into `folder`, which becomes a folder of the PATH."""
        self.folder = folder
        self.path = folder / "c++"
        self.log = folder / "log"
        self.log.touch()
        self.write(_TOY_COMPILER.format(log=self.log, folder=folder))

    def write(self, text: str) -> None:
        """Replace the script."""
        self.path.write_text(text)
        self.path.chmod(0o755)

    def set_version(self, version: str) -> None:
        """Have it name another version."""
        self.write(self.path.read_text().replace("toy 1.0", version))

    def fail(self) -> None:
        """Have every compilation fail from now on."""
        (self.folder / "fail").touch()

    @property
    def made(self) -> list[str]:
        """The names of the files that it made, in the order in which it began."""
        words = [line.split() for line in self.log.read_text().splitlines()]
        return [Path(line[-1]).name for line in words if "-o" in line]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def toy_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyCompiler:
    """The only compiler on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    compiler = ToyCompiler(folder)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    return compiler


@pytest.fixture
def toy_sources(tmp_path: Path) -> Path:
    """A folder of C++ sources: two files of the proxy in a room each, one of the host, one header."""
    folder = tmp_path / "sources"
    for room in ("ggml_proxy/one", "ggml_proxy/other", "llama_host"):
        (folder / room).mkdir(parents=True)
    start = '#include "one/toy.h"\nextern "C" __attribute__((visibility("default")))'
    (folder / "ggml_proxy/one/toy.h").write_text("int hidden();\n")
    (folder / "ggml_proxy/one/proxy.cpp").write_text(f"{start} int toy_proxy() {{ return hidden(); }}\n")
    (folder / "ggml_proxy/other/shared.cpp").write_text('#include "one/toy.h"\nint hidden() { return 42; }\n')
    (folder / "llama_host/toy.cpp").write_text(f"{start} int toy_host() {{ return 7; }}\n")
    return folder


@pytest.fixture
def toy_llama(tmp_path: Path) -> Path:
    """A llama.cpp folder: headers of API 3, ggml 0.26.0, and libraries in build/bin (not loadable)."""
    root = tmp_path / "llama.cpp"
    for name, text in {
        "include/llama.h": "#pragma once\n",
        "ggml/include/ggml-backend.h": "#pragma once\n",
        "ggml/src/ggml-backend-impl.h": "#pragma once\n    #define GGML_BACKEND_API_VERSION 3\n",
        "ggml/CMakeLists.txt": _TOY_VERSION,
        "build/bin/libllama.so": "llama",
        "build/bin/libggml.so": "ggml",
        "build/bin/libggml-base.so": "base",
        "build/bin/libggml-cpu.so": "cpu",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def toy_engine(toy_llama: Path) -> Engine:
    """The engine of the toy folder."""
    return find_folder(toy_llama)


@pytest.fixture
def toy_report() -> SelftestReport:
    """What a self-test of the toy engine would find."""
    return SelftestReport("0.26.0", 3, {"model": {"n_gpu_layers": -1}, "context": {}}, ("CPU",))
