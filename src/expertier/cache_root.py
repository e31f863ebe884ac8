"""The user's cache folder: built engines, compiled functions, measured rates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from expertier.errors import ConfigError

CACHE_VARIABLE = "EXPERTIER_CACHE_DIR"


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder: the one that EXPERTIER_CACHE_DIR names, or the user's own. It may not exist yet.

    Raises ConfigError where the folder is below a home folder and this user has no home folder.
    """
    chosen = environ.get(CACHE_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(
                f"{CACHE_VARIABLE} is {chosen!r}, and the home folder that it names cannot be found: give the "
                "folder's whole path"
            ) from error
    import platformdirs  # imported late: a machine that only measures may lack it, and then sets the variable

    found = platformdirs.user_cache_path("expertier")
    if not found.is_absolute():  # the `~` could not be resolved
        raise ConfigError(
            f"the user {os.getuid()} has no home folder for a cache: set {CACHE_VARIABLE} to a folder of yours"
        )
    return found
