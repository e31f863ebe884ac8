from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expertier.engine_adapter.build import info as info_module
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.info import engine_info
from expertier.engine_adapter.build.plugin import ensure_plugin
from expertier.engine_adapter.build.selftest_run import SelftestReport
from expertier.errors import EngineMissingError

if TYPE_CHECKING:
    from conftest import ToyCompiler


def test_a_folder_before_anything_is_built(toy_compiler: ToyCompiler, toy_llama: Path, cache: Path) -> None:
    info = engine_info(toy_llama)
    assert info.package == "llama.cpp"
    assert info.version == info.ggml_version == "0.26.0"
    assert info.api_version == 3
    assert not info.pinned
    assert info.plugin_proxy is None
    assert not info.plugin_tested
    assert info.devices is None
    assert info.compiler is not None
    assert str(toy_compiler.path) in info.compiler
    assert info.cache_folder == str(cache)
    assert info.problem is None
    assert toy_compiler.made == []


def test_a_folder_with_a_plugin(
    toy_compiler: ToyCompiler,
    toy_llama: Path,
    toy_engine: Engine,
    toy_report: SelftestReport,
) -> None:
    assert toy_compiler
    built = ensure_plugin(toy_engine, selftest=lambda *_: toy_report)
    info = engine_info(toy_llama)
    assert info.plugin_tested
    assert info.plugin_proxy == str(built.proxy_path)
    assert info.plugin_host == str(built.host_path)
    assert info.devices == ("CPU",)


def test_nothing_there_is_told_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(_: object) -> Engine:
        raise EngineMissingError("no inference engine")

    monkeypatch.setattr(info_module, "find_engine", missing)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    info = engine_info()
    assert info.package is None
    assert info.libraries == ()
    assert info.compiler is None
    assert info.problem is not None
    assert "CXX" in info.problem
    assert "no inference engine" in info.problem


def test_a_wheel_that_is_not_pinned_is_a_problem(
    toy_engine: Engine, toy_compiler: ToyCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert toy_compiler
    wheel = dataclasses.replace(toy_engine, package="xllamacpp", version="1.0", source=None)
    monkeypatch.setattr(info_module, "find_engine", lambda _: wheel)
    info = engine_info()
    assert info.package == "xllamacpp"
    assert not info.pinned
    assert info.ggml_version is None
    assert info.api_version is None
    assert info.problem is not None
    assert "not the pinned one" in info.problem


def test_headers_of_an_unknown_api_do_not_hide_the_rest(toy_compiler: ToyCompiler, toy_llama: Path) -> None:
    assert toy_compiler
    (toy_llama / "ggml/src/ggml-backend-impl.h").write_text("#define GGML_BACKEND_API_VERSION 9\n")
    info = engine_info(toy_llama)
    assert info.api_version is None
    assert info.version == "0.26.0"


def test_it_is_a_json_document(toy_compiler: ToyCompiler, toy_llama: Path) -> None:
    assert toy_compiler
    document = json.loads(json.dumps(engine_info(toy_llama).as_dict()))
    assert document["package"] == "llama.cpp"
    assert document["plugin_tested"] is False
