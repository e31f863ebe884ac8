"""Warnings are errors in what tests compile, and in no user's build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from expertier.added_flags import C_VARIABLE, CPP_VARIABLE, added_flags
from expertier.engine_adapter.build.compiler import compile_flags, compile_libraries, find_compiler
from expertier.errors import BuildError
from expertier.hip.fake import build
from strict_flags import STRICT_C, STRICT_CPP

ROOT = Path(__file__).parents[1]
_WARNED_OF = "int narrowed(long wide) { int unused = 1; return wide; }\n"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A plugin's folders, with a file each; the proxy's has two warnings."""
    for name, text in {"ggml_proxy": _WARNED_OF, "llama_host": "int nothing() { return 0; }\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "made.cpp").write_text(text)
    return tmp_path


def test_a_warning_is_an_error_here(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        compile_libraries(find_compiler(), sources, tmp_path, tmp_path / "out")
    assert "conversion]" in str(caught.value)
    assert "unused-variable]" in str(caught.value)


def test_a_warning_is_no_error_in_a_users_build(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPP_VARIABLE)
    assert all(
        path.exists() for path in compile_libraries(find_compiler(), sources, tmp_path, tmp_path / "out")
    )
    assert not [flag for flag in compile_flags() if flag == "-Werror"]


def test_the_fake_gpu_libraries_get_the_flags_of_both_languages(tmp_path: Path) -> None:
    for variable in (C_VARIABLE, CPP_VARIABLE):
        with pytest.raises(BuildError, match="no-such-flag"):
            build(tmp_path, {**os.environ, variable: "--no-such-flag"})


def test_flags_are_split_as_a_shell_does() -> None:
    assert added_flags("X", {"X": "-O1 '-DNAME=a b'"}) == ("-O1", "-DNAME=a b")
    assert added_flags("X", {}) == ()


@pytest.mark.parametrize("variable", [C_VARIABLE, CPP_VARIABLE])
def test_all_that_tests_compile_is_strict(variable: str) -> None:
    strict = STRICT_C if variable == C_VARIABLE else STRICT_CPP
    assert "-Werror" in strict
    if "-fsanitize" not in os.environ[variable]:
        assert added_flags(variable) == strict


def test_what_no_other_test_compiles_has_no_warning() -> None:
    source = ROOT / "benchmarks" / "policy" / "hot_path.cpp"
    command = [
        *find_compiler().command,
        "-std=c++17",
        "-O2",
        *STRICT_CPP,
        "-c",
        str(source),
        "-o",
        os.devnull,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
