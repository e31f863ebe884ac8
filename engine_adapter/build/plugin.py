"""The built plugin: found in the user's cache, or compiled, tried in a child process and put there.

    look up ──found──► verify ──► Plugin
       │ none                       ▲
       ▼                            │
    headers ► compile ► self-test ► compare ► rename into place
                                        └─ any failure: the staging folder is removed

A folder in the cache is complete from the moment it has its name. Its name holds hashes of everything that
went in: sources, headers, engine library, flags, and the compiler.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from expertier.engine_adapter.build.build_info import BuildInfo
from expertier.engine_adapter.build.cache import (
    cache_folder,
    locked,
    make_subfolder,
    move_into_place,
    require_trusted_cache,
    staging,
)
from expertier.engine_adapter.build.compiler import (
    HOST_FOLDER,
    HOST_LIBRARY,
    PROXY_FOLDER,
    PROXY_LIBRARY,
    Compiler,
    compile_flags,
    compile_libraries,
    find_compiler,
    link_flags,
    list_compilers,
)
from expertier.engine_adapter.build.defaults import Defaults, differences
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.hashing import hash_file, hash_files, hash_text
from expertier.engine_adapter.build.header_root import hash_headers, read_api_version, read_ggml_version
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.engine_adapter.build.selftest_run import SelftestReport, run_selftest
from expertier.errors import BuildError, EngineMismatchError

Selftest = Callable[[Engine, Path, Path], SelftestReport]
"""Tries (engine, proxy library, host library) and reports, or raises EngineMismatchError."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that was built for one engine and passed its self-test."""

    proxy_path: Path
    host_path: Path
    info: BuildInfo


def ensure_plugin(
    engine: Engine,
    progress: Progress = silent,
    *,
    rebuild: bool = False,
    sources: Path | None = None,
    selftest: Selftest = run_selftest,
) -> Plugin:
    """Return the plugin for `engine`, building it the first time.

    `sources` is the folder of C++ files (by default the installed one), `selftest` the function that tries fresh
    libraries.
    Errors: EngineMismatchError, when the engine is not the pinned one, its headers are of an unknown API, the
    self-test fails or the default parameters differ; BuildError, when there is no compiler or it fails.
    """
    require_pinned(engine)
    sources = sources or installed_sources()
    name = _folder_name(engine, sources)
    if not rebuild and (found := find_plugin(engine, sources=sources)):
        return found
    find_compiler()  # before a folder is made, so that nothing is left behind where there is no compiler
    folder = make_subfolder("plugins")
    with locked(folder / f".{name}.lock"):
        if not rebuild and (found := find_plugin(engine, sources=sources)):  # another process built it
            return found
        compiler = find_compiler()
        target = folder / f"{name}-{_compiler_key(compiler)}"
        with staging(folder) as fresh:
            _build(engine, sources, compiler, fresh, progress, selftest)
            # A folder that exists already was just built by another process, or is damaged.
            move_into_place(fresh, target, keep=lambda: not rebuild and _read(target, engine) is not None)
        progress(f"the plugin is built and tested: {target}")
    built = _read(target, engine)
    if built is None:
        raise BuildError(f"the plugin that was just built in {target} cannot be read back; is the disk full?")
    return built


def find_plugin(engine: Engine, *, sources: Path | None = None) -> Plugin | None:
    """Return the cached plugin for `engine`, None where there is no usable one; nothing is built.

    Where this machine no longer has a compiler, a plugin built by any compiler is usable.
    Errors: EngineMismatchError, when the engine is not the pinned one, or the cached plugin was built with
    other default parameters than the pin's; ConfigError, when other users could have put the plugin there.
    """
    require_pinned(engine)
    folder = cache_folder() / "plugins"
    name = _folder_name(engine, sources or installed_sources())
    try:
        candidates = [folder / f"{name}-{_compiler_key(compiler)}" for compiler in list_compilers()]
    except BuildError:  # a $CXX that does not run: an error only when there is something to compile
        candidates = []
    candidates = candidates or sorted(folder.glob(f"{name}-*"))
    return next((plugin for path in candidates if (plugin := _read(path, engine))), None)


def installed_sources() -> Path:
    """Return the folder that the plugin's C++ sources lie below, as installed with expertier."""
    return Path(str(files("expertier.engine_adapter")))


def check_defaults(recorded: Defaults, found: Defaults, engine: Engine) -> None:
    """Compare the engine's default parameters with the recorded ones. Errors: EngineMismatchError."""
    lines = differences(recorded, found)
    if lines:
        raise EngineMismatchError(
            f"{engine} has other default parameters than recorded, so its structures may be laid out "
            "differently:\n  " + "\n  ".join(lines) + f"\n{engine.remedy}"
        )


def require_pinned(engine: Engine) -> None:
    """Refuse a wheel that is not, byte for byte, the pinned one; a user's folder brings its own headers.

    A library that is compiled when it is installed has no pinned bytes: the self-test and its report decide instead.

    Errors: EngineMismatchError, saying what was found and what is pinned.
    """
    if engine.source is not None or engine.is_pinned:
        return
    if engine.pin is not None and engine.pin.compiled_at_install:
        return
    if engine.pin is None:
        found = f"version {engine.version} is installed, which is not the pinned one"
    elif engine.pinned_sha256 is None:
        machines = ", ".join(engine.pin.library_sha256)
        found = f"no library is pinned for this kind of machine, only for {machines}"
    else:
        found = f"its library has sha256 {engine.library_sha256}, the pinned one {engine.pinned_sha256}"
    raise EngineMismatchError(
        f"there is no plugin for {engine}: {found}. Headers and library must be of one commit; {engine.remedy}"
    )


def _folder_name(engine: Engine, sources: Path) -> str:
    """Name the cache folder after everything but the compiler."""
    inputs = hash_text(_hash_sources(sources), _headers_id(engine), engine.library_sha256, _flags())
    return f"{engine.package}-{engine.version}-{inputs[:16]}".replace(" ", "_")


def _flags() -> str:
    return " ".join((*compile_flags(), *link_flags()))


def _compiler_key(compiler: Compiler) -> str:
    return hash_text(compiler.version)[:8]


def _hash_sources(sources: Path) -> str:
    kinds = [f"{folder}/**/*.{ending}" for folder in (PROXY_FOLDER, HOST_FOLDER) for ending in ("cpp", "h")]
    return hash_files([path for kind in kinds for path in sources.glob(kind)], sources)


def _headers_id(engine: Engine) -> str:
    """Identify the headers without fetching them: the pinned source package's hash, or the folder's."""
    if engine.source is not None:
        return hash_headers(engine.source)
    assert engine.pin is not None
    return engine.pin.source_sha256


def _build(
    engine: Engine,
    sources: Path,
    compiler: Compiler,
    folder: Path,
    progress: Progress,
    selftest: Selftest,
) -> None:
    """Fill `folder` with the two libraries and their build.json, or raise."""
    headers = engine.source
    if headers is None:
        assert engine.pin is not None
        headers = ensure_headers(engine.pin, progress)
    api_version = read_api_version(headers)
    proxy, host = compile_libraries(compiler, sources, headers, folder, progress)
    shutil.rmtree(folder / "objects")
    progress("testing the plugin in a child process")
    report = selftest(engine, proxy, host)
    _compare(engine, report, headers, api_version)
    BuildInfo(
        package=engine.package,
        version=engine.version,
        engine_libraries=tuple(map(str, engine.libraries)),
        library_sha256=engine.library_sha256,
        headers=_headers_id(engine),
        api_version=api_version,
        ggml_version=report.ggml_version,
        defaults=report.defaults,
        devices=report.devices,
        sources=_hash_sources(sources),
        compiler=str(compiler),
        flags=_flags(),
        proxy_sha256=hash_file(proxy),
        host_sha256=hash_file(host),
    ).write(folder)


def _compare(engine: Engine, report: SelftestReport, headers: Path, api_version: int) -> None:
    """Compare what the self-test found with what the pin or the user's folder says."""
    pin = engine.pin if engine.source is None else None
    wanted = pin.ggml_version if pin else read_ggml_version(headers)
    found = report.ggml_version.split("-")[0]  # some builds add "-dev" or "-dirty"
    if wanted is not None and found != wanted:
        raise EngineMismatchError(
            f"the library of {engine} is ggml {report.ggml_version}, its headers are ggml {wanted}; in a "
            f"folder of yours, build llama.cpp again. Or {engine.remedy}"
        )
    expected_api = pin.api_version if pin else api_version
    if not report.api_version == api_version == expected_api:
        raise EngineMismatchError(
            f"the plugin for {engine} reports backend API {report.api_version}, the headers say "
            f"{api_version}, expected is {expected_api}; {engine.remedy}"
        )
    if pin is not None:
        check_defaults(pin.defaults, report.defaults, engine)


def _read(folder: Path, engine: Engine) -> Plugin | None:
    """Return the plugin in a cache folder; None when it is incomplete or damaged.

    Errors: ConfigError, when other users could have put it there; EngineMismatchError.
    """
    if folder.exists():
        require_trusted_cache(folder)
    info = BuildInfo.read(folder)
    if info is None:
        return None
    plugin = Plugin(folder / PROXY_LIBRARY, folder / HOST_LIBRARY, info)
    try:
        undamaged = (hash_file(plugin.proxy_path), hash_file(plugin.host_path)) == (
            info.proxy_sha256,
            info.host_sha256,
        )
    except OSError:
        return None
    if not undamaged:
        return None
    if info.library_sha256 != engine.library_sha256:
        raise EngineMismatchError(
            f"the plugin in {folder} was built for another library than that of {engine}: sha256 "
            f"{info.library_sha256}, found {engine.library_sha256}; {engine.remedy}"
        )
    if engine.source is None and engine.pin is not None:
        check_defaults(engine.pin.defaults, info.defaults, engine)
    return plugin
