"""Memory that runs out within the proxy: an error, after which nothing is held and everything works."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from engine_runs.tiered_runs import SMALL, write_small_model
from failures import failing_allocations
from limits.waits import PATIENCE_S


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: this one's proxy is registered already, and what fails may end the process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def setup(engine, plugin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("failed_allocations")
    proxy = failing_allocations.build_proxy()
    return failing_allocations.Setup(
        engine.libraries, proxy, plugin.host_path, write_small_model(folder, "Q4_K+Q6_K")
    )


@pytest.mark.parametrize("n_slots", [pytest.param(2, marks=pytest.mark.deep), SMALL.experts])
def test_in_a_batch(child, setup, n_slots):
    errors = child.submit(failing_allocations.decode, setup, n_slots).result(PATIENCE_S)
    assert len(errors) > 10
    assert all("status -" in error for error in errors)


def test_in_opening_a_model(child, setup):
    errors = child.submit(failing_allocations.open_model, setup).result(PATIENCE_S)
    assert len(errors) > 10


def test_a_wait_for_others_ends_however_often_it_is_woken(child, setup):
    waited_s = child.submit(failing_allocations.wait_for_others, setup).result(PATIENCE_S)
    assert 0.5 < waited_s < 50, "a second of its minute was left"
