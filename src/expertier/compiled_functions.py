"""Numba's decorators with our cache folder: compiled functions are cached there, or else compiled in each process.

    @njit(cache=True)                    here: @cached_njit()
    njit(signature, cache=True)(f)       here: cached_njit(signature)(f)
    cfunc(signature, cache=True)(f)      here: cached_cfunc(signature)(f)

Numba caches functions beside their source, or in the home folder, and raises an error where neither can be written. We
have Numba cache functions in `compiled/` of our cache folder, unless NUMBA_CACHE_DIR names another folder. Where our
folder cannot be written, Numba tries its own places; where no place can be written, or the disk is full, one warning
says so and nothing is cached. Numba is imported with the first function.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from expertier.cache_root import CACHE_VARIABLE, cache_root
from expertier.errors import ConfigError
from expertier.failures import reason
from expertier.trusted_folder import make_private_folder, require_trusted

FOLDER = "compiled"
"""The name of our folder in the cache folder."""

_log = logging.getLogger(__name__)
_F = TypeVar("_F", bound=Callable[..., Any])
_STALE_S = 3600.0


class _State:
    """What this process knows of the cache."""

    lock = threading.RLock()
    depth = 0  # how many nested blocks have Numba use our folder now
    before = ""  # Numba's own setting before these blocks
    is_broken = False  # the cache has failed once, and is not tried again


def cached_njit(*signature: Any, **options: Any) -> Callable[[_F], _F]:
    """Return Numba's `njit` decorator, with its cache."""

    def decorate(function: _F) -> _F:
        from numba import njit

        def compile_it(use_cache: bool) -> Any:
            any_njit: Any = njit
            return any_njit(*signature, cache=use_cache, **options)(function)

        return cast(_F, _compiled(compile_it))

    return decorate


def cached_cfunc(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return Numba's `cfunc` decorator, with its cache."""

    def decorate(function: Callable[..., Any]) -> Any:
        from numba import cfunc

        return _compiled(lambda use_cache: cfunc(signature, cache=use_cache)(function))

    return decorate


def _compiled(compile_it: Callable[[bool], Any]) -> Any:
    """Compile with the cache, or without it where the cache cannot be used."""
    if _State.is_broken:
        return compile_it(False)
    with _our_folder():
        try:
            made = compile_it(True)
        except (
            Exception
        ) as error:  # a damaged cache may raise anything; an error of the function comes again below
            made = compile_it(False)
            _give_up(error)
            return made
    if hasattr(made, "_cache"):  # a function whose types are not known yet is cached once they are
        made._cache = _Forgiving(made._cache)
    return made


class _Forgiving:
    """A cache of Numba's whose errors, such as a full disk or a damaged entry, do not stop a compilation."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *arguments: Any) -> Any:
        """Return the cached function; None where it cannot be read."""
        try:
            return self._cache.load_overload(*arguments)
        except Exception as error:
            _give_up(error)
            return None

    def save_overload(self, *arguments: Any) -> None:
        """Cache a function where that is possible."""
        try:
            self._cache.save_overload(*arguments)
        except Exception as error:
            _give_up(error)


@contextmanager
def _our_folder() -> Iterator[None]:
    """Have Numba cache the block's functions in our folder, unless the user has named another folder to Numba."""
    from numba import config

    settings: Any = config  # Numba sets its attributes at import
    with _State.lock:
        if _State.depth == 0:
            _State.before = settings.CACHE_DIR
            if not _State.before:
                settings.CACHE_DIR = _folder()
        _State.depth += 1
    try:
        yield
    finally:
        with _State.lock:
            _State.depth -= 1
            if _State.depth == 0:
                settings.CACHE_DIR = _State.before


def _folder() -> str:
    """Return our folder, made if need be; an empty string where there is none."""
    try:
        root = cache_root()
    except ConfigError:
        return ""
    folder = root / FOLDER
    if folder not in _trusted:
        try:
            make_private_folder(folder, root)
            require_trusted(folder, root)
        except OSError:
            return ""
        except ConfigError as error:
            if str(error) not in _warned:
                _warned.add(str(error))
                _log.warning("compiled functions are not saved in the cache folder: %s", error)
            return ""
        _trusted.add(folder)
    _remove_stale(folder)
    return str(folder)


_trusted: set[Path] = set()  # folders checked in this process: the check walks through a whole folder
_warned: set[str] = set()
_removed: set[Path] = set()


def _remove_stale(folder: Path) -> None:
    """Remove, once a process, the files that another process left half-written when it ended."""
    if folder in _removed:
        return
    _removed.add(folder)
    for left in folder.glob("*/*.tmp.*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()


def _give_up(error: Exception) -> None:
    """Say once that functions are compiled in each process."""
    if _State.is_broken:
        return
    _State.is_broken = True
    said = (
        str(error)
        if not isinstance(error, OSError)
        else f"{reason(error)} ({error.filename or 'no file named'})"
    )
    _log.warning(
        "compiled functions cannot be cached, so each process compiles them again, which takes some seconds: %s; set "
        "%s to a folder that you can write to, with some MiB free%s",
        said,
        CACHE_VARIABLE,
        " (NUMBA_CACHE_DIR is set, and is used first)" if os.environ.get("NUMBA_CACHE_DIR") else "",
    )
