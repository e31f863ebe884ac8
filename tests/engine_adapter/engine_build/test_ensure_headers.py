from __future__ import annotations

import dataclasses
import importlib.util
import io
import tarfile
import threading
from pathlib import Path

import pytest

from expertier.engine_adapter.build.hashing import hash_file
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.pins import EnginePin
from expertier.errors import BuildError, ConfigError, EngineMismatchError
from limits.waits import joined

_TOY_PIP = """
import pathlib, shutil, sys, time
folder = pathlib.Path({folder!r})
with (folder / "log").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if (folder / "fail").exists():
    sys.exit("ERROR: No matching distribution found")
time.sleep(0.05)
shutil.copy(folder / "toy-1.0.tar.gz", sys.argv[sys.argv.index("--dest") + 1])
"""

_HEADERS = {
    "toy-1.0/third/llama.cpp/include/llama.h": "llama",
    "toy-1.0/third/llama.cpp/ggml/include/ggml-backend.h": "backend",
    "toy-1.0/third/llama.cpp/ggml/src/ggml-backend-impl.h": "#define GGML_BACKEND_API_VERSION 3\n",
}
_OTHERS = {
    "toy-1.0/third/llama.cpp/ggml/src/ggml.c": "not a header",
    "toy-1.0/third/llama.cpp/ggml/src/ggml-cuda/common.cuh.h": "not directly inside",
    "toy-1.0/include/llama.h": "another root",
    "../../evil/include/llama.h": "outside",
}


class ToyIndex:
    """A package index with one source package, and the pip that fetches from it."""

    def __init__(self, folder: Path) -> None:
        """Write both into `folder`."""
        self.folder = folder
        self.archive = folder / "toy-1.0.tar.gz"
        (folder / "pip").mkdir(parents=True)
        (folder / "pip" / "__init__.py").touch()
        (folder / "pip" / "__main__.py").write_text(_TOY_PIP.format(folder=str(folder)))
        self.fill(_HEADERS | _OTHERS)

    def fill(self, files: dict[str, str]) -> None:
        """Write the source package."""
        with tarfile.open(self.archive, "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
            link = tarfile.TarInfo("toy-1.0/third/llama.cpp/include/link.h")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)

    @property
    def pin(self) -> EnginePin:
        """The pin of what the index serves."""
        return EnginePin("toy", "1.0", hash_file(self.archive), "third/llama.cpp", "0.26.0", 3)

    @property
    def calls(self) -> list[str]:
        """The arguments of each call of pip."""
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyIndex:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "index"))
    return ToyIndex(tmp_path / "index")


def kept(cache: Path) -> list[Path]:
    """What is in the cache, but for locks."""
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_only_the_headers_are_kept(index: ToyIndex, cache: Path) -> None:
    root = ensure_headers(index.pin)
    assert root.is_relative_to(cache)
    found = {path.relative_to(root).as_posix() for path in kept(cache)}
    assert found == {name.removeprefix("toy-1.0/third/llama.cpp/") for name in _HEADERS}
    assert (root / "include/llama.h").read_text() == "llama"
    assert not (cache.parent / "evil").exists()


def test_pip_is_asked_for_exactly_this_source_package(index: ToyIndex) -> None:
    ensure_headers(index.pin)
    (call,) = index.calls
    assert call.startswith("download ")
    assert "--no-deps --no-binary toy toy==1.0 --dest " in call
    assert ":all:" not in call
    assert "--no-build-isolation" not in call


def test_the_second_call_fetches_nothing(index: ToyIndex) -> None:
    messages: list[str] = []
    first = ensure_headers(index.pin, messages.append)
    assert messages
    messages.clear()
    assert ensure_headers(index.pin, messages.append) == first
    assert len(index.calls) == 1
    assert messages == []


def test_another_package_than_the_pinned_one_is_refused_and_not_kept(index: ToyIndex, cache: Path) -> None:
    pin = dataclasses.replace(index.pin, source_sha256="0" * 64)
    with pytest.raises(EngineMismatchError, match=f"sha256 {hash_file(index.archive)}, not 0000"):
        ensure_headers(pin)
    assert kept(cache) == []


def test_a_package_without_the_headers_is_refused_and_not_kept(index: ToyIndex, cache: Path) -> None:
    index.fill(_OTHERS)
    with pytest.raises(EngineMismatchError, match=r"no usable headers below third/llama\.cpp"):
        ensure_headers(index.pin)
    assert kept(cache) == []


def test_an_archive_that_is_none_is_refused_and_not_kept(index: ToyIndex, cache: Path) -> None:
    index.archive.write_bytes(b"not an archive")
    with pytest.raises(EngineMismatchError, match="no usable headers"):
        ensure_headers(index.pin)
    assert kept(cache) == []


def test_a_failing_pip_is_shown_with_its_command(index: ToyIndex, cache: Path) -> None:
    (index.folder / "fail").touch()
    with pytest.raises(
        BuildError, match=r"(?s)status 1.*-m pip download.*No matching distribution.*--llama-cpp"
    ):
        ensure_headers(index.pin)
    assert kept(cache) == []


def test_a_python_without_pip_is_told_how_to_get_it(index: ToyIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match="python -m ensurepip"):
        ensure_headers(index.pin)


def test_several_at_once_fetch_once(index: ToyIndex) -> None:
    pin = index.pin
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_headers(pin)), daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(index.calls) == 1


def test_headers_that_others_could_have_planted(index: ToyIndex, cache: Path) -> None:
    """A header is compiled, so it is code."""
    headers = ensure_headers(index.pin)
    for place in (headers / "include" / "llama.h", headers / "include", headers, headers.parent, cache):
        place.chmod(0o777)
        with pytest.raises(ConfigError, match=f"from {place}: every user can write to it"):
            ensure_headers(index.pin)
        place.chmod(0o700)
    assert ensure_headers(index.pin) == headers
