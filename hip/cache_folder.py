"""Where compiled kernels and the fake driver are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from expertier.cache_root import cache_root


def cache_subfolder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a folder in the user's cache folder, made if need be. Raises `OSError` where that fails.

    EXPERTIER_CACHE_DIR names another cache folder. Raises ConfigError where this user has none.
    """
    folder = cache_root(environ) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
