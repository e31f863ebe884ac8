"""Compiles kernels, and keeps the machine code on disk."""

from __future__ import annotations

import hashlib
import logging
from importlib.resources import files
from pathlib import Path

from expertier.atomic_file import write_atomically
from expertier.errors import ConfigError
from expertier.hip.kernels.cache_folder import cache_subfolder
from expertier.hip.kernels.compiler import RuntimeCompiler

_log = logging.getLogger(__name__)


def kernel_source(name: str) -> str:
    """Return the text of a kernel source file of this package."""
    return files("expertier.hip.kernels").joinpath(name).read_text(encoding="utf-8")


def compiled(compiler: RuntimeCompiler, source: str, architecture: str) -> bytes:
    """Return machine code for `source`: from the cache folder where it was compiled before, else newly compiled.

    The file's name has a digest of everything that the code depends on: the source, the architecture, the options, and
    the compiler by name, version and file. Where the cache folder cannot be used, a warning is logged, and the source
    is compiled each time. Raises `DeviceError` where it does not compile.
    """
    path = _place(compiler, source, architecture)
    if path is not None:
        try:
            content = path.read_bytes()
            if content[:32] == hashlib.sha256(content[32:]).digest():
                return content[32:]
            _log.warning("%s is damaged; compiling again", path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("compiled kernels cannot be read from %s (%s); compiling again", path, error)
    code = compiler.compile(source, architecture)
    if path is not None:
        try:
            write_atomically(path, hashlib.sha256(code).digest() + code)
        except OSError as error:
            _log.warning("compiled kernels cannot be kept in %s: %s", path, error)
    return code


def _place(compiler: RuntimeCompiler, source: str, architecture: str) -> Path | None:
    parts = [
        source,
        *compiler.options(architecture),
        compiler.path,
        compiler.version(),
        _stamp(compiler.path),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    try:
        return cache_subfolder("kernels") / f"{compiler.vendor}-{architecture.split(':')[0]}-{key}.bin"
    except (OSError, ConfigError) as error:
        _log.warning("compiled kernels cannot be kept: %s", error)
        return None


def _stamp(path: str) -> str:
    """Return size and time of the library's file; an empty text where its path is not known, only its bare name."""
    try:
        status = Path(path).stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
