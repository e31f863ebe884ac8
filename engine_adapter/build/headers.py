"""The pinned headers: fetched once with pip, out of the source package of the same package and version.

The engine's wheel brings no headers, and another package's headers of the same version number differ.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tarfile
from pathlib import Path, PurePosixPath

from expertier.children import run_child
from expertier.engine_adapter.build.cache import (
    locked,
    make_subfolder,
    move_into_place,
    require_trusted_cache,
    staging,
)
from expertier.engine_adapter.build.hashing import hash_file
from expertier.engine_adapter.build.header_root import HEADER_FOLDERS, list_headers
from expertier.engine_adapter.build.pins import EnginePin
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.errors import BuildError, EngineMismatchError, EngineMissingError
from expertier.temporary_folder import temporary_folder

_LAST_LINES = 15


def ensure_headers(pin: EnginePin, progress: Progress = silent) -> Path:
    """Return the folder with the pin's headers in the user's cache, fetching them the first time.

    Errors: EngineMismatchError, when the index serves another source package than the pinned one (nothing of
    it is saved); BuildError, when it cannot be fetched or the cache folder cannot be written; ConfigError,
    when other users can write to it.
    """
    folder = make_subfolder("headers")
    target = folder / f"{pin.package}-{pin.version}-{pin.source_sha256[:12]}"
    require_trusted_cache(target)
    if target.is_dir():
        return target
    with locked(folder / f".{target.name}.lock"):
        if target.is_dir():
            return target
        with (
            temporary_folder("expertier-headers-", "the engine's headers") as download,
            staging(folder) as fresh,
        ):
            progress(f"fetching the headers of {pin.requirement} (its source package, once)")
            archive = _download(pin, download)
            _check(pin, archive)
            progress("unpacking the headers")
            _unpack(pin, archive, fresh)
            move_into_place(fresh, target)
    return target


def _download(pin: EnginePin, folder: Path) -> Path:
    """Have pip download the source package into `folder` and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise BuildError(
            f"the headers of {pin.requirement} are fetched with pip, which this Python ({sys.executable}) "
            "does not have; install it: python -m ensurepip"
        )
    # The package by its name, never `:all:`, which would build every build dependency from source.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--no-binary", pin.package, pin.requirement, "--dest", str(folder)]
    result = run_child(command, merges_errors=True)
    archives = list(folder.glob("*.tar.gz"))
    if result.returncode != 0 or len(archives) != 1:
        last = "\n".join(result.stdout.strip().splitlines()[-_LAST_LINES:])
        raise BuildError(
            f"the source package of {pin.requirement}, with the headers that the plugin is compiled against, "
            f"could not be fetched: pip ended with status {result.returncode}\n"
            f"  {shlex.join(command)}\n{last}\n"
            "check the network and the package index, or name a llama.cpp folder with --llama-cpp DIR"
        )
    return archives[0]


def _check(pin: EnginePin, archive: Path) -> None:
    found = hash_file(archive)
    if found != pin.source_sha256:
        raise EngineMismatchError(
            f"the package index served another source package of {pin.requirement} than the pinned one: "
            f"sha256 {found}, not {pin.source_sha256}; nothing of it was saved. Try pip's default index, "
            "or name a llama.cpp folder with --llama-cpp DIR"
        )


def _unpack(pin: EnginePin, archive: Path, target: Path) -> None:
    """Write only the headers that a plugin needs, as plain files, below `target`."""
    root = PurePosixPath(pin.header_root)
    wanted = {root / folder: target / folder for folder in HEADER_FOLDERS}
    for folder in wanted.values():
        folder.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:gz") as source:
            for member in source:
                inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if inside.parent in wanted and inside.suffix == ".h" and member.isfile():
                    content = source.extractfile(member)
                    assert content is not None
                    (wanted[inside.parent] / inside.name).write_bytes(content.read())
        list_headers(target)
    except (tarfile.TarError, EngineMissingError) as error:
        raise EngineMismatchError(
            f"the source package of {pin.requirement} has no usable headers below {pin.header_root}: {error}"
        ) from error
    except OSError as error:
        raise BuildError(f"the headers could not be written below {target}: {error}") from error
