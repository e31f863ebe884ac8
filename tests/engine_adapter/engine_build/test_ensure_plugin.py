from __future__ import annotations

import dataclasses
import os
import platform
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expertier.engine_adapter.build import plugin as plugin_module
from expertier.engine_adapter.build.build_info import FILE_NAME, BuildInfo
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.locate import find_folder
from expertier.engine_adapter.build.pins import EnginePin
from expertier.engine_adapter.build.plugin import Plugin, Selftest, ensure_plugin, find_plugin
from expertier.engine_adapter.build.selftest_run import SelftestReport, run_selftest
from expertier.errors import BuildError, ConfigError, EngineMismatchError
from limits.waits import joined

if TYPE_CHECKING:
    from conftest import ToyCompiler


class Builder:
    """`ensure_plugin` over the toys, with a self-test that counts its calls and says what it is told to."""

    def __init__(self, engine: Engine, sources: Path, report: SelftestReport) -> None:
        """Build for `engine` from `sources`; the self-test finds `report`."""
        self.engine = engine
        self.sources = sources
        self.report = report
        self.tested = 0

    def selftest(self, engine: Engine, proxy: Path, host: Path) -> SelftestReport:
        assert engine == self.engine
        assert proxy.is_file()
        assert host.is_file()
        self.tested += 1
        return self.report

    def ensure(self, *, rebuild: bool = False, selftest: Selftest | None = None) -> Plugin:
        return ensure_plugin(
            self.engine, rebuild=rebuild, sources=self.sources, selftest=selftest or self.selftest
        )

    def find(self) -> Plugin | None:
        return find_plugin(self.engine, sources=self.sources)


@pytest.fixture
def builder(
    toy_compiler: ToyCompiler, toy_engine: Engine, toy_sources: Path, toy_report: SelftestReport
) -> Builder:
    assert toy_compiler
    return Builder(toy_engine, toy_sources, toy_report)


def pinned(engine: Engine, report: SelftestReport, headers: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Make a wheel of the toy engine, with a pin that fits it and `headers` as the pinned ones."""
    pin = EnginePin(
        "toy", "1.0", "5" * 64, "third/llama.cpp", "0.26.0", 3, "toy.so",
        {platform.machine(): engine.library_sha256}, report.defaults,
    )  # fmt: skip
    monkeypatch.setattr(plugin_module, "ensure_headers", lambda *_: headers)
    return dataclasses.replace(engine, package="toy", version="1.0", pin=pin, source=None)


def plugins(cache: Path) -> list[Path]:
    """The plugin folders in the cache, unfinished ones included."""
    return [path for path in (cache / "plugins").iterdir() if path.is_dir()]


def test_the_first_call_builds_and_records_everything(builder: Builder, cache: Path) -> None:
    built = builder.ensure()
    assert [built.proxy_path.parent] == plugins(cache)
    assert sorted(path.name for path in built.proxy_path.parent.iterdir()) == [
        FILE_NAME, "libexpertier_host.so", "libexpertier_proxy.so",
    ]  # fmt: skip
    info = built.info
    assert info == BuildInfo.read(built.proxy_path.parent)
    assert (info.package, info.version, info.ggml_version, info.api_version) == (
        "llama.cpp", "0.26.0", "0.26.0", 3,
    )  # fmt: skip
    assert info.library_sha256 == builder.engine.library_sha256
    assert info.engine_libraries == tuple(map(str, builder.engine.libraries))
    assert info.defaults == builder.report.defaults
    assert info.devices == ("CPU",)
    assert "toy 1.0" in info.compiler
    assert "-std=c++17" in info.flags


def test_the_second_call_builds_nothing(builder: Builder, toy_compiler: ToyCompiler) -> None:
    first = builder.ensure()
    made = len(toy_compiler.made)
    assert builder.ensure() == first
    assert builder.find() == first
    assert len(toy_compiler.made) == made
    assert builder.tested == 1


def test_find_builds_nothing(builder: Builder, toy_compiler: ToyCompiler) -> None:
    assert builder.find() is None
    assert toy_compiler.made == []


def test_rebuild_builds_again_in_the_same_place(builder: Builder, cache: Path) -> None:
    first = builder.ensure()
    assert builder.ensure(rebuild=True).proxy_path == first.proxy_path
    assert builder.tested == 2
    assert len(plugins(cache)) == 1


def test_every_input_makes_another_plugin(
    builder: Builder, toy_compiler: ToyCompiler, toy_llama: Path, cache: Path
) -> None:
    builder.ensure()
    (builder.sources / "ggml_proxy/one/toy.h").write_text("int hidden(); // changed\n")
    builder.ensure()
    (toy_llama / "include/llama.h").write_text("#pragma once // changed\n")
    builder.ensure()
    (toy_llama / "build/bin/libllama.so").write_text("another build")
    builder.engine = find_folder(toy_llama)
    builder.ensure()
    toy_compiler.set_version("toy 2.0")
    builder.ensure()
    assert builder.tested == 5
    assert len(plugins(cache)) == 5


def test_a_built_plugin_needs_no_compiler(
    builder: Builder, toy_compiler: ToyCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = builder.ensure()
    toy_compiler.path.unlink()
    assert builder.ensure() == first
    monkeypatch.setenv("CXX", str(toy_compiler.path))
    assert builder.ensure() == first
    monkeypatch.delenv("CXX")
    with pytest.raises(BuildError, match="no C"):
        builder.ensure(rebuild=True)
    assert builder.find() == first


@pytest.mark.parametrize("name", ["libexpertier_proxy.so", "libexpertier_host.so", FILE_NAME])
@pytest.mark.parametrize("gone", [True, False])
def test_a_damaged_plugin_is_built_again(builder: Builder, name: str, gone: bool) -> None:
    first = builder.ensure()
    damaged = first.proxy_path.with_name(name)
    damaged.unlink() if gone else damaged.write_text("{}")
    assert builder.find() is None
    assert builder.ensure().proxy_path == first.proxy_path
    assert builder.tested == 2


def test_a_compile_error_leaves_nothing(builder: Builder, toy_compiler: ToyCompiler, cache: Path) -> None:
    toy_compiler.fail()
    with pytest.raises(BuildError, match="told to fail"):
        builder.ensure()
    assert plugins(cache) == []


def test_a_crash_in_the_selftest_leaves_nothing(
    builder: Builder, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_crash.py").write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineMismatchError, match="SIGSEGV"):
        builder.ensure(selftest=lambda e, p, h: run_selftest(e, p, h, module="toy_crash"))
    assert plugins(cache) == []
    assert builder.find() is None
    builder.ensure()
    assert builder.tested == 1


def test_a_library_of_another_ggml_than_the_folder_is_refused(builder: Builder, cache: Path) -> None:
    builder.report = dataclasses.replace(builder.report, ggml_version="0.25.3")
    with pytest.raises(EngineMismatchError, match=r"is ggml 0\.25\.3, its headers are ggml 0\.26\.0"):
        builder.ensure()
    assert plugins(cache) == []


def test_a_suffix_of_the_ggml_version_does_not_count(builder: Builder) -> None:
    builder.report = dataclasses.replace(builder.report, ggml_version="0.26.0-dev")
    assert builder.ensure().info.ggml_version == "0.26.0-dev"


def test_a_folder_that_hides_its_version_is_taken_by_the_selftest(builder: Builder, toy_llama: Path) -> None:
    (toy_llama / "ggml/CMakeLists.txt").unlink()
    builder.engine = find_folder(toy_llama)
    builder.report = dataclasses.replace(builder.report, ggml_version="7.7.7")
    assert builder.ensure().info.ggml_version == "7.7.7"


def test_another_api_than_the_headers_is_refused(builder: Builder, cache: Path) -> None:
    builder.report = dataclasses.replace(builder.report, api_version=2)
    with pytest.raises(EngineMismatchError, match="reports backend API 2, the headers say 3"):
        builder.ensure()
    assert plugins(cache) == []


def test_headers_of_an_unknown_api_are_refused_before_anything_is_compiled(
    builder: Builder, toy_compiler: ToyCompiler, toy_llama: Path
) -> None:
    (toy_llama / "ggml/src/ggml-backend-impl.h").write_text("#define GGML_BACKEND_API_VERSION 9\n")
    with pytest.raises(EngineMismatchError, match="API 9"):
        builder.ensure()
    assert toy_compiler.made == []


def test_a_pinned_wheel_is_built_from_the_pinned_headers(
    builder: Builder, toy_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.engine = pinned(builder.engine, builder.report, toy_llama, monkeypatch)
    built = builder.ensure()
    assert built.info.headers == "5" * 64
    assert built.proxy_path.parent.name.startswith("toy-1.0-")
    assert builder.ensure() == built


def test_a_pinned_wheel_with_other_defaults_is_refused_field_by_field(
    builder: Builder, toy_llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.engine = pinned(builder.engine, builder.report, toy_llama, monkeypatch)
    builder.report = dataclasses.replace(builder.report, defaults={"model": {"n_gpu_layers": 0}})
    with pytest.raises(EngineMismatchError, match=r"model\.n_gpu_layers: recorded -1, now 0"):
        builder.ensure()
    assert plugins(cache) == []


def test_a_cached_plugin_is_compared_with_the_recorded_defaults_at_load(
    builder: Builder, toy_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.engine = pinned(builder.engine, builder.report, toy_llama, monkeypatch)
    built = builder.ensure()
    dataclasses.replace(built.info, defaults={"model": {}, "context": {}}).write(built.proxy_path.parent)
    with pytest.raises(EngineMismatchError, match=r"model\.n_gpu_layers: recorded -1, missing now"):
        builder.ensure()


def test_a_cached_plugin_of_another_library_is_refused_at_load(builder: Builder) -> None:
    built = builder.ensure()
    dataclasses.replace(built.info, library_sha256="0" * 64).write(built.proxy_path.parent)
    with pytest.raises(EngineMismatchError, match="built for another library"):
        builder.ensure()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"library_sha256": "0" * 64}, "its library has sha256 0000"),
        ({"version": "2.0", "pin": None}, "version 2.0 is installed"),
        ({"machine": "riscv64"}, "no library is pinned for this kind of machine, only for riscv64"),
    ],
)
def test_a_wheel_that_is_not_pinned_is_refused(
    builder: Builder,
    toy_llama: Path,
    toy_compiler: ToyCompiler,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    reason: str,
) -> None:
    engine = pinned(builder.engine, builder.report, toy_llama, monkeypatch)
    if machine := changes.pop("machine", None):
        assert engine.pin is not None
        changes["pin"] = dataclasses.replace(engine.pin, library_sha256={machine: "0" * 64})
    builder.engine = dataclasses.replace(engine, **changes)
    with pytest.raises(EngineMismatchError, match=reason):
        builder.find()
    with pytest.raises(EngineMismatchError, match=reason) as caught:
        builder.ensure()
    assert "--force-reinstall" in str(caught.value)
    assert "engine build --llama-cpp DIR" in str(caught.value)
    assert toy_compiler.made == []


def test_several_at_once_build_once(builder: Builder, cache: Path) -> None:
    found: list[Plugin] = []
    threads = [threading.Thread(target=lambda: found.append(builder.ensure()), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert len(found) == 4
    assert builder.tested == 1
    assert len(plugins(cache)) == 1


def test_without_locks_several_at_once_still_end_with_one(
    builder: Builder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    meeting = threading.Barrier(3)
    found: list[Plugin] = []

    def selftest(*_: object) -> SelftestReport:
        meeting.wait(30)
        return builder.report

    threads = [
        threading.Thread(target=lambda: found.append(builder.ensure(selftest=selftest)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert found == [found[0]] * 3
    assert len(plugins(cache)) == 1


def test_no_cache_no_plugin(builder: Builder, cache: Path) -> None:
    cache.write_text("a file is in the way")
    with pytest.raises(BuildError, match="EXPERTIER_CACHE_DIR"):
        builder.ensure()


def test_a_killed_build_leaves_nothing_that_counts(builder: Builder, cache: Path) -> None:
    (cache / "plugins" / ".new-killed").mkdir(parents=True)
    (cache / "plugins" / ".new-killed" / "libexpertier_proxy.so").write_text("half")
    assert builder.find() is None
    assert builder.ensure().proxy_path.is_file()


@pytest.mark.parametrize("what", ["cache", "plugins", "folder", "proxy", "host", "record"])
def test_a_plugin_that_others_could_have_planted(builder: Builder, cache: Path, what: str) -> None:
    """It has the right name, the right hashes in its record, and would be loaded into this process."""
    plugin = builder.ensure()
    folder = plugin.proxy_path.parent
    place = {
        "cache": cache,
        "plugins": cache / "plugins",
        "folder": folder,
        "proxy": plugin.proxy_path,
        "host": plugin.host_path,
        "record": folder / FILE_NAME,
    }[what]
    place.chmod(0o777)
    for look in (builder.find, builder.ensure):
        with pytest.raises(ConfigError, match=f"from {place}: every user can write to it"):
            look()
    place.chmod(0o700)
    assert builder.find() == plugin


def test_nobody_else_can_write_to_what_is_built(builder: Builder, cache: Path) -> None:
    old = os.umask(0)
    try:
        plugin = builder.ensure()
    finally:
        os.umask(old)
    assert builder.find() == plugin
    assert cache.stat().st_mode & 0o777 == 0o700
    assert plugin.proxy_path.stat().st_mode & 0o022 == 0
