"""The folder in which compiled kernels and the fake driver are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from expertier.cache_root import cache_root
from expertier.trusted_folder import make_private_folder, require_trusted


def cache_subfolder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the subfolder `name` of the user's cache folder, which is made where it does not exist.

    EXPERTIER_CACHE_DIR names another cache folder. Raises `OSError` where the folder cannot be made, and `ConfigError`
    where this user has no cache folder, or other users can write to it or to anything in it.
    """
    root = cache_root(environ)
    folder = root / name
    make_private_folder(folder, root)
    require_trusted(folder, root)
    return folder
