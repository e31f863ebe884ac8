"""Where compiled kernels and the fake driver are kept between runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from expertier.trusted_folder import make_private_folder, require_trusted


def cache_subfolder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a folder in the user's cache folder, made if need be, that nobody else can write to.

    EXPERTIER_CACHE_DIR names another cache folder. Raises `OSError` where it cannot be made, `ConfigError` where others
    can write to it or to anything in it.
    """
    chosen = environ.get("EXPERTIER_CACHE_DIR")
    if chosen:
        root = Path(chosen).expanduser().absolute()
    else:
        import platformdirs  # late: a machine that only measures may lack it, and sets the variable

        root = platformdirs.user_cache_path("expertier")
    folder = root / name
    make_private_folder(folder, root)
    require_trusted(folder, root)
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, whoever else writes it. Raises `OSError`."""
    handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
