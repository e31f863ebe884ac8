from __future__ import annotations

from pathlib import Path

import pytest

from expertier.engine_adapter.build.header_root import (
    hash_headers,
    list_headers,
    read_api_version,
    read_ggml_version,
)
from expertier.errors import EngineMismatchError, EngineMissingError

IMPL = "ggml/src/ggml-backend-impl.h"


@pytest.mark.parametrize("version", [2, 3])
def test_a_known_api_version_is_read(toy_llama: Path, version: int) -> None:
    (toy_llama / IMPL).write_text(f"  #define GGML_BACKEND_API_VERSION   {version}\n")
    assert read_api_version(toy_llama) == version


@pytest.mark.parametrize("version", [1, 4, 33])
def test_an_unknown_api_version_is_refused_with_the_known_ones(toy_llama: Path, version: int) -> None:
    (toy_llama / IMPL).write_text(f"#define GGML_BACKEND_API_VERSION {version}\n")
    with pytest.raises(EngineMismatchError, match=f"API {version}; this expertier knows 2 and 3"):
        read_api_version(toy_llama)


def test_headers_without_an_api_version_are_refused(toy_llama: Path) -> None:
    (toy_llama / IMPL).write_text("int api_version; // initialize to GGML_BACKEND_API_VERSION\n")
    with pytest.raises(EngineMismatchError, match="defines no GGML_BACKEND_API_VERSION"):
        read_api_version(toy_llama)


def test_a_folder_without_headers_says_which_are_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match=r"include/llama\.h, ggml/include/ggml-backend\.h"):
        list_headers(tmp_path)


def test_only_headers_directly_in_the_three_folders_count(toy_llama: Path) -> None:
    before = hash_headers(toy_llama)
    (toy_llama / "ggml/src/ggml-cuda").mkdir()
    (toy_llama / "ggml/src/ggml-cuda/common.h").write_text("")
    (toy_llama / "ggml/src/ggml.c").write_text("")
    assert hash_headers(toy_llama) == before
    (toy_llama / "ggml/src/ggml-impl.h").write_text("")
    assert hash_headers(toy_llama) != before


def test_ggml_version_is_read_where_it_can_be(toy_llama: Path) -> None:
    assert read_ggml_version(toy_llama) == "0.26.0"
    (toy_llama / "ggml/CMakeLists.txt").write_text("set(GGML_VERSION_MAJOR 1)\n")
    assert read_ggml_version(toy_llama) is None
    (toy_llama / "ggml/CMakeLists.txt").unlink()
    assert read_ggml_version(toy_llama) is None
