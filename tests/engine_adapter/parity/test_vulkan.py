"""Experts on a Vulkan device, whose buffers all begin at the same address; docs/testing-an-engine.md has the build.

Mesa's software device will do.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from engine_runs.tiered_runs import write_small_model
from engine_runs.vulkan_runs import DEVICE, compare
from expertier.engine_adapter.build.locate import LIBRARY_FOLDERS
from limits.waits import PATIENCE_S

pytestmark = pytest.mark.deep

ENVIRONMENT = {"GGML_VK_VISIBLE_DEVICES": os.environ.get("GGML_VK_VISIBLE_DEVICES", "0")}
"""Without it llama.cpp leaves software devices out."""


@pytest.fixture(scope="module")
def with_vulkan() -> Path:
    named = os.environ.get("EXPERTIER_TEST_LLAMA_CPP")
    if not named:
        pytest.skip("EXPERTIER_TEST_LLAMA_CPP names no llama.cpp that was built with -DGGML_VULKAN=ON")
    if not any((Path(named) / folder / "libggml-vulkan.so").exists() for folder in LIBRARY_FOLDERS):
        pytest.skip(f"{named} was built without -DGGML_VULKAN=ON")
    return Path(named)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K+Q6_K"])
def test_logits_are_those_of_stock_on_the_same_device(with_vulkan: Path, tmp_path: Path, kind: str) -> None:
    path = write_small_model(tmp_path, kind)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        served = process.submit(compare, with_vulkan, path, ENVIRONMENT).result(PATIENCE_S)
    if served is None:
        pytest.skip(f"no {DEVICE}: there is no driver, or GGML_VK_VISIBLE_DEVICES names none")
    assert all(served.values()), f"a way that was not taken: {served}"
