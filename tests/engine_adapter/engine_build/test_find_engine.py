from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from expertier.engine_adapter.build import locate
from expertier.engine_adapter.build.hashing import hash_file
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.pins import XLLAMACPP
from expertier.errors import EngineMissingError


class ToyWheel:
    """What importlib.metadata says of an installed package."""

    def __init__(self, site: Path, version: str) -> None:
        """Lay the engine's library into `site`."""
        self.site = site
        self.version = version
        assert XLLAMACPP.library is not None
        self.library = site / XLLAMACPP.library
        self.library.parent.mkdir(parents=True)
        self.library.write_bytes(b"an engine")

    def locate_file(self, path: str) -> Path:
        return self.site / path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyWheel:
    toy = ToyWheel(tmp_path / "site", XLLAMACPP.version)
    monkeypatch.setattr(locate, "distribution", lambda _: toy)
    return toy


def test_the_wheel_is_found_and_not_judged(wheel: ToyWheel) -> None:
    engine = find_engine()
    assert (engine.package, engine.version) == ("xllamacpp", XLLAMACPP.version)
    assert engine.libraries == (wheel.library,)
    assert engine.library_sha256 == hash_file(wheel.library)
    assert engine.pin is XLLAMACPP
    assert not engine.is_pinned
    assert str(wheel.library) in str(engine)


def test_another_version_has_no_pin(wheel: ToyWheel) -> None:
    wheel.version = "2026.11.1"
    engine = find_engine()
    assert engine.version == "2026.11.1"
    assert engine.pin is None
    assert engine.pinned_sha256 is None
    assert not engine.is_pinned


def test_no_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(locate, "distribution", missing)
    with pytest.raises(EngineMissingError, match=r"pip install 'expertier\[llama\]'"):
        find_engine()


def test_a_wheel_without_its_library_says_to_reinstall(wheel: ToyWheel) -> None:
    wheel.library.unlink()
    with pytest.raises(EngineMissingError, match="--force-reinstall xllamacpp=="):
        find_engine()


def test_a_folder_is_found_with_its_libraries_in_loading_order(toy_llama: Path) -> None:
    engine = find_engine(toy_llama)
    names = [path.name for path in engine.libraries]
    assert names == ["libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so"]
    assert engine.version == "0.26.0"
    assert engine.source == toy_llama
    assert engine.pin is None


@pytest.mark.parametrize("place", ["build", "build/lib", "lib", "."])
def test_libraries_are_found_in_each_usual_place(toy_llama: Path, place: str) -> None:
    (toy_llama / place).mkdir(exist_ok=True)
    for library in (toy_llama / "build/bin").iterdir():
        library.rename(toy_llama / place / library.name)
    engine = find_engine(str(toy_llama))
    assert {path.parent for path in engine.libraries} == {toy_llama / place}


def test_the_numbered_name_is_taken_where_it_exists(toy_llama: Path) -> None:
    library = toy_llama / "build/bin/libggml.so"
    shutil.copy(library, library.with_name("libggml.so.0.26.0"))
    shutil.copy(library, library.with_name("libggml.so.0"))
    assert "libggml.so.0" in [path.name for path in find_engine(toy_llama).libraries]


def test_other_backends_count_but_are_the_engines_to_load(toy_llama: Path) -> None:
    before = find_engine(toy_llama)
    backend = toy_llama / "build/bin/libggml-hip.so"
    backend.write_text("hip")
    after = find_engine(toy_llama)
    assert after.libraries == before.libraries
    assert after.library_sha256 != before.library_sha256


def test_a_folder_without_a_cpu_library_will_do(toy_llama: Path) -> None:
    (toy_llama / "build/bin/libggml-cpu.so").unlink()
    assert len(find_engine(toy_llama).libraries) == 3


def test_a_folder_without_libraries_says_how_to_build_them(toy_llama: Path) -> None:
    (toy_llama / "build/bin/libllama.so").unlink()
    with pytest.raises(EngineMissingError, match="-DBUILD_SHARED_LIBS=ON"):
        find_engine(toy_llama)


def test_a_folder_without_headers_is_no_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match=r"no llama\.cpp source folder"):
        find_engine(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match=r"no folder .*nowhere"):
        find_engine(tmp_path / "nowhere")
