"""A skeleton of a model: sparse copies of its files whose experts are holes.

A skeleton is for engines that only take a path. The loader reads zeros where experts would be, which take no disk, and
hands them to a buffer that drops them. Skeletons lie in the cache folder, under a name that changes with the model's
files. A skeleton takes as much disk as the model without its experts.

    model.gguf      [ header ][ tensors ][ experts ................ ][ tensors ]
    skeleton        [ header ][ tensors ][ hole                     ][ tensors ]
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from expertier.cache_root import CACHE_VARIABLE
from expertier.engine_adapter.build.cache import (
    locked,
    make_subfolder,
    move_into_place,
    require_trusted_cache,
    staging,
)
from expertier.engine_adapter.build.hashing import hash_text
from expertier.errors import BuildError, SourceError
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB, mib

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 16 * MIB
_ORIGIN = "made-from"  # names the model that a skeleton is of


def ensure_skeleton(table: ExpertTable) -> Path:
    """Return the path that an engine loads instead of the model: the first file of its skeleton, made where missing.

    Where the cache's file system has no holes, return the model's own path and log a warning once: the loader then
    reads the experts as well, and the buffer drops them.

    Raises:
        SourceError: a file of the model changed or could not be read. BuildError: the cache cannot be written.
        ConfigError: other users can write to it.
    """
    folder = make_subfolder("skeletons")
    target = folder / _name(table)
    require_trusted_cache(target)
    if not target.is_dir():
        with locked(folder / f".{target.name}.lock"):
            if not target.is_dir():
                _remove_stale(folder, table)
                with staging(folder) as fresh:
                    for file in table.files:
                        _copy_without_experts(table, file, fresh / file.path.name)
                    if not _has_holes(table, fresh):
                        _log.warning(
                            "%s: the file system of %s has no holes for a skeleton, so that the engine reads all "
                            "experts once while it loads; set EXPERTIER_CACHE_DIR to a folder on another file system "
                            "to avoid that",
                            table.path.name,
                            folder,
                        )
                        return table.path
                    (fresh / _ORIGIN).write_bytes(os.fsencode(table.path))
                    move_into_place(fresh, target)
    return target / table.path.name


def _name(table: ExpertTable) -> str:
    return hash_text(*(f"{file.path}|{file.identity}" for file in table.files))[:20]


def _remove_stale(folder: Path, table: ExpertTable) -> None:
    """Remove skeletons of earlier versions of this model's files, and of models that no longer exist."""
    for origin in folder.glob(f"*/{_ORIGIN}"):
        try:
            made_from = Path(os.fsdecode(origin.read_bytes()))
        except OSError:  # another process is removing it as well
            continue
        if made_from == table.path or not made_from.exists():
            shutil.rmtree(origin.parent, ignore_errors=True)


def _copy_without_experts(table: ExpertTable, file: ModelFile, target: Path) -> None:
    try:
        opened = open(file.path, "rb", buffering=0)  # noqa: SIM115 (the file object closes when it is dropped)
    except OSError as error:
        raise SourceError(f"{file.path} cannot be opened: {error.strerror}; restore the file") from error
    source = opened.fileno()
    try:
        change = file.identity.difference(FileIdentity.of(os.fstat(source)))
        if change is not None:
            raise SourceError(f"{file.path} changed after its header was read: {change}; start again")
        with open(target, "wb") as out:
            for begin, end in _ranges_to_copy(table, file):
                while begin < end:
                    data = _read(source, file, begin, min(_CHUNK_BYTES, end - begin))
                    if not data:
                        raise SourceError(
                            f"{file.path} ends at byte {begin}, but {end} are needed; restore the file"
                        )
                    out.seek(begin)
                    out.write(data)
                    begin += len(data)
            out.truncate(file.identity.n_bytes)
    except OSError as error:
        raise BuildError(
            f"the skeleton of {file.path} cannot be written to {target.parent}: {error.strerror}; make room, or set "
            f"{CACHE_VARIABLE} to another folder"
        ) from error
    finally:
        opened.close()


def _read(source: int, file: ModelFile, begin: int, n_bytes: int) -> bytes:
    try:
        return os.pread(source, n_bytes, begin)
    except OSError as error:
        raise SourceError(
            f"{file.path}: asked for {n_bytes} bytes at {begin}: {error.strerror}; check the disk, then try again"
        ) from error


def _ranges_to_copy(table: ExpertTable, file: ModelFile) -> Iterator[tuple[int, int]]:
    """Yield the ranges [begin, end) of the file that hold no expert."""
    at = file.begin
    for begin, end in table.expert_ranges:
        if begin >= file.end:
            break
        if end > file.begin:
            if begin > at:
                yield at - file.begin, begin - file.begin
            at = end
    if at < file.end:
        yield at - file.begin, file.end - file.begin


def _has_holes(table: ExpertTable, folder: Path) -> bool:
    """Whether the copies take about as much disk as the bytes that were written to them, and not their full sizes."""
    taken = sum((folder / file.path.name).stat().st_blocks * 512 for file in table.files)
    written = table.file_bytes - table.expert_bytes_total
    _log.info("%s: its skeleton takes %s of disk", table.path.name, mib(taken))
    return taken <= written + table.expert_bytes_total // 2
