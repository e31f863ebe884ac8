"""Finds the engine without loading it: the installed wheel, or the libraries in a llama.cpp folder."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.hashing import hash_file, hash_files
from expertier.engine_adapter.build.header_root import list_headers, read_ggml_version
from expertier.engine_adapter.build.pins import XLLAMACPP, EnginePin
from expertier.errors import EngineMissingError

LIBRARY_FOLDERS = ("build/bin", "build/lib", "build", "bin", "lib", "lib64", ".")
"""Where a llama.cpp folder may keep its shared libraries, in the order in which they are looked for."""

INSTALL = "pip install 'expertier[llama]'"
_NEEDED = ("ggml-base", "ggml", "llama")


def find_engine(llama_cpp: str | os.PathLike[str] | None = None, pin: EnginePin = XLLAMACPP) -> Engine:
    """Return the engine in the folder `llama_cpp`, or the installed wheel of `pin`'s package.

    The engine is neither imported nor checked: `Engine.is_pinned` tells whether it is the pinned library.
    Errors: EngineMissingError.
    """
    return find_wheel(pin) if llama_cpp is None else find_folder(Path(llama_cpp))


def find_wheel(pin: EnginePin = XLLAMACPP) -> Engine:
    """Return the engine that the wheel of `pin`'s package brought. Errors: EngineMissingError."""
    assert pin.library is not None, f"{pin.requirement} has no library at a known place"
    try:
        wheel = distribution(pin.package)
    except PackageNotFoundError as error:
        raise EngineMissingError(
            f"no inference engine: the package {pin.requirement} is not installed; {INSTALL}, "
            "or name a llama.cpp folder with --llama-cpp DIR"
        ) from error
    library = Path(str(wheel.locate_file(pin.library)))
    if not library.is_file():
        raise EngineMissingError(
            f"the package {pin.package} {wheel.version} is installed, but its library {library} is not "
            f"there; reinstall it: pip install --force-reinstall {pin.requirement}"
        )
    known = pin if wheel.version == pin.version else None
    return Engine(pin.package, wheel.version, (library,), hash_file(library), pin=known)


def find_folder(folder: Path) -> Engine:
    """Return the engine of a llama.cpp source folder with shared libraries built inside.

    Errors: EngineMissingError, naming what is not there.
    """
    root = folder.expanduser().resolve()
    if not root.is_dir():
        raise EngineMissingError(f"there is no folder {root}; name a llama.cpp folder with --llama-cpp DIR")
    list_headers(root)
    for name in LIBRARY_FOLDERS:
        found = {stem: _library(root / name, stem) for stem in _NEEDED}
        if all(found.values()):
            return _folder_engine(root, root / name)
    looked = ", ".join(LIBRARY_FOLDERS)
    raise EngineMissingError(
        f"{root} has no shared llama.cpp libraries (libllama.so, libggml.so, libggml-base.so) in any of its "
        f"{looked}; build them: cmake -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target llama"
    )


def _folder_engine(root: Path, libraries: Path) -> Engine:
    """Describe the engine whose libraries lie in `libraries`.

    We load only the core, which brings the backends that it is linked to. The engine loads all other backends, as
    several variants may define the same symbols. The hash covers all of these libraries.
    """
    core = [_library(libraries, stem) for stem in ("ggml-base", "ggml-cpu", "ggml", "llama")]
    loaded = tuple(path for path in core if path is not None)
    stems = {path.name.removeprefix("lib").split(".so")[0] for path in libraries.glob("libggml-*.so*")}
    backends = {path for stem in stems if (path := _library(libraries, stem)) is not None}
    version = read_ggml_version(root) or "of unknown version"
    return Engine("llama.cpp", version, loaded, hash_files({*loaded, *backends}, libraries), source=root)


def _library(folder: Path, stem: str) -> Path | None:
    """Return the file of a shared library under the name that other libraries load it by.

    That is `libX.so.N` where it exists: opening `libX.so` too would load a second copy of it, with a registry
    of its own, where the two are copies instead of links.
    """
    numbered = [p for p in folder.glob(f"lib{stem}.so.*") if p.name.removeprefix(f"lib{stem}.so.").isdigit()]
    plain = folder / f"lib{stem}.so"
    candidates = [*sorted(numbered, reverse=True), plain]
    return next((path for path in candidates if path.is_file()), None)
