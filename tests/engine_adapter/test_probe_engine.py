"""The engine's part of the probe: its equations on given times, and one real, short run."""

from __future__ import annotations

import pytest

from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.probe import engine_rates
from expertier.probe.engine_rates import _Run, _Sizes, _solve, measure_engine

SIZES = {"small": _Sizes(12, 20 * 10**6, 250_000), "large": _Sizes(6, 70 * 10**6, 2 * 10**6)}


def times(
    layer_s: float, byte_s: float, each_s: float, fill_byte_s: float
) -> dict[tuple[str, str], list[_Run]]:
    runs = {}
    for name, size in SIZES.items():
        whole = size.layers * layer_s + size.token_bytes * byte_s
        misses = 20.0
        missed = misses * (each_s + size.expert_bytes * fill_byte_s)
        runs[name, "all"] = [_Run(whole, 0.0, 0.5)] * 3
        runs[name, "page cache"] = [_Run(whole + missed, misses, 0.5)] * 3
        runs[name, "pool"] = [_Run(whole + missed / 2, misses, 0.5)] * 3
    return runs


def test_the_rates_come_back_from_the_times() -> None:
    found = _solve(times(1e-4, 1e-10, 5e-5, 2e-10), SIZES)
    assert found.decode.each_s == pytest.approx(1e-4)
    assert found.decode.bytes_per_s == pytest.approx(1e10)
    assert found.page_cache.each_s == pytest.approx(5e-5)
    assert found.page_cache.bytes_per_s == pytest.approx(5e9)
    assert found.pool.seconds(1, 2e6) == pytest.approx(found.page_cache.seconds(1, 2e6) / 2)
    assert found.prefill.bytes_per_s == pytest.approx(70e6 * engine_rates._PROMPT / 0.5)
    assert found.decode.measured
    assert found.decode.spread == 0.1, "equal times: the least that is assumed"


GPU_SIZES = SIZES | {"shallow": _Sizes(3, 6 * 10**6, 250_000)}


def gpu_times(token_s: float, lookup_s: float) -> dict[tuple[str, str], list[_Run]]:
    """Layers of 1e-4 s, bytes at 1e12 a second, misses of 2e-5 s and bytes at 5e10."""
    runs = {}
    for name, size in GPU_SIZES.items():
        whole = token_s + size.layers * 1e-4 + size.token_bytes * 1e-12
        for kind, misses in (("pool", 1.0), ("page cache", 1.0), ("looked up", 0.1)):
            missed = size.layers * misses * (2e-5 + size.expert_bytes * 2e-11)
            looked_up = whole + size.layers * lookup_s
            runs[name, kind] = [_Run(looked_up + missed, size.layers * misses, 0.5)] * 3
        runs[name, "all"] = [_Run(whole, 0.0, 0.5)] * 3
    return runs


def test_what_a_token_and_a_look_up_cost_comes_back_from_the_times_of_a_gpu() -> None:
    found = _solve(gpu_times(2e-4, 7e-6), GPU_SIZES)
    assert found.token_s == pytest.approx(2e-4)
    assert found.lookup_s == pytest.approx(7e-6)
    assert found.decode.each_s == pytest.approx(1e-4)
    assert found.decode.bytes_per_s == pytest.approx(1e12)
    for path in (found.pool, found.page_cache):
        assert path.each_s == pytest.approx(2e-5)
        assert path.bytes_per_s == pytest.approx(5e10)


def test_two_models_alone_put_a_tokens_cost_down_to_bytes() -> None:
    runs = {key: found for key, found in gpu_times(2e-4, 0.0).items() if key[0] != "shallow"}
    found = _solve(runs, SIZES)
    assert found.token_s == 0
    assert found.decode.bytes_per_s < 0.6e12


def test_a_tokens_cost_below_zero_is_noise() -> None:
    runs = gpu_times(2e-4, 0.0)
    runs["shallow", "all"] = [_Run(4e-4, 0.0, 0.5)] * 3  # as many layers less would take
    assert _solve(runs, GPU_SIZES).token_s >= 0
    runs["shallow", "all"] = [_Run(1e-6, 0.0, 0.5)] * 3
    found = _solve(runs, GPU_SIZES)
    two = _solve({key: of for key, of in runs.items() if key[0] != "shallow"}, SIZES)
    assert found.token_s == 0
    assert (found.decode.each_s, found.decode.bytes_per_s) == (two.decode.each_s, two.decode.bytes_per_s)


def test_noise_that_makes_no_sense_is_all_the_bytes() -> None:
    runs = times(0.0, 1e-10, 0.0, 2e-10)
    runs["small", "all"] = [_Run(1e-4, 0.0, 0.5)] * 3  # faster than its bytes allow
    found = _solve(runs, SIZES)
    assert found.decode.each_s == 0
    assert found.decode.bytes_per_s == pytest.approx(70e6 / 7e-3)
    runs["large", "all"] = [_Run(s, 0.0, 0.5) for s in (5e-3, 7e-3, 12e-3)]
    assert _solve(runs, SIZES).decode.spread == pytest.approx(0.5)


def test_a_short_run(loaded_engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rates, "_LAYERS", {"small": 2, "large": 2})
    monkeypatch.setattr(engine_rates, "_EXPERTS", {"small": 8, "large": 8})
    monkeypatch.setattr(engine_rates, "_STEPS", 8)
    monkeypatch.setattr(engine_rates, "_PROMPT", 8)
    said: list[str] = []
    found = measure_engine(loaded_engine, said.append, n_threads=1, rounds=1)
    for rate in (found.decode, found.prefill, found.pool, found.page_cache):
        assert rate.bytes_per_s > 0
        assert rate.each_s >= 0
        assert 0.1 <= rate.spread < 1
    assert any("large" in line for line in said)
