"""The commands, as a user runs them."""

from __future__ import annotations

import pytest

import expertier as et
from expertier.engine_adapter.models.synth import TINY_SHAPE


def test_version_and_help(expertier):
    assert expertier("--version", fresh=True).out.strip() == et.__version__
    assert "engine" in expertier("--help").out


def test_inspect(expertier, tiny):
    ended = expertier("inspect", tiny, "--arena-mib", 4, "--json", fresh=True)
    assert ended.status == 0
    document = ended.document
    assert document["layers"] == TINY_SHAPE.layers
    assert document["top_k"] == TINY_SHAPE.top_k
    assert document["expert_bytes"] == TINY_SHAPE.expert_bytes_total
    assert [layer["experts"] for layer in document["per_layer"]] == [TINY_SHAPE.experts] * TINY_SHAPE.layers
    assert document["per_layer"][0]["types"]["gate"] == TINY_SHAPE.gate_up_type
    assert document["arena"]["used_bytes"] <= document["arena"]["budget_bytes"] == 4 << 20
    assert 0 < document["arena"]["share_of_experts"] < 1

    table = expertier("inspect", tiny, "--arena-mib", 4)
    assert table.status == 0
    assert "smallest arena" in table.out
    assert f"blk.0 to {TINY_SHAPE.layers - 1}" in table.out


@pytest.mark.parametrize("policy", ["lfu-decay", pytest.param("lru", marks=pytest.mark.deep)])
def test_run(expertier, tiny, policy):
    arguments = ("run", tiny, "-p", "a few words", "-n", 12, "-t", 1, "--policy", policy)
    plain = expertier(*arguments, env={"MOE_EXPERT_CACHE_MIB": "4", "MOE_HOST_POOL_MIB": "2"}, fresh=True)
    assert plain.status == 0, plain.err
    assert "L1 arena" in plain.err
    text = plain.out.removesuffix("\n")

    ended = expertier(*arguments, "--expert-cache-mib", 4, "--host-pool-mib", 2, "--json")
    document = ended.document
    assert document["text"] == text, "greedy output is the same each time, in both forms"
    assert document["generated_tokens"] <= 12
    assert document["l1"]["budget_bytes"] == 4 << 20
    assert document["l2"]["peak_bytes"] <= document["l2"]["budget_bytes"] == 2 << 20
    assert document["load"]["expert_bytes_read"] == 0
    assert document["l1"]["hits"] + document["l1"]["misses"] > 0


def test_run_sizes_itself(expertier, tiny):
    document = expertier("run", tiny, "-p", "a few words", "-n", 2, "-t", 1, "--json").document
    assert document["l1"]["budget_bytes"] == pytest.approx(TINY_SHAPE.expert_bytes_total / 4, rel=0.01)
    assert document["l2"]["budget_bytes"] == 0, "on the host, L1 and L2 share RAM"


def test_engine_info(expertier):
    document = expertier("engine", "info", "--json").document
    assert document["package"] == "xllamacpp"
    assert document["pinned"]
    assert document["api_version"] == 3
    assert document["plugin_tested"]
    assert "TIER_CPU" in document["devices"]
    assert document["problem"] is None
    assert "ggml version" in expertier("engine", "info").out


def test_engine_build_is_done_once(expertier):
    first = expertier("engine", "build", "--json")
    assert first.status == 0
    assert first.document == expertier("engine", "build", "--json").document


QUICK_DEMO = """
from functools import partial
from expertier.engine_adapter.hosts import demo
from expertier.engine_adapter.models.synth import TINY_SHAPE
demo.run_demo.__kwdefaults__["shape"] = TINY_SHAPE
demo.RunOptions = partial(demo.RunOptions, n_threads=1)
demo.DECODE_TOKENS = 16
"""


@pytest.mark.parametrize(
    ("code", "n_tokens"),
    [(QUICK_DEMO, 16), pytest.param("", 128, marks=pytest.mark.deep)],
    ids=["tiny", "whole"],
)
def test_demo(expertier, code, n_tokens):
    """With the tests' model, and as `make demo` runs it."""
    ended = expertier("demo", "--json", code=code)
    assert ended.status == 0, ended.err
    document = ended.document
    assert document["parity"] == {
        "bit_identical": True,
        "prefill_tokens": 300,
        "decode_tokens": n_tokens,
        "largest_difference": 0.0,
    }
    assert set(document["tokens_per_s"]) == {"stock", "stock_norepack", "tiers"}
    assert all(speed > 0 for speed in document["tokens_per_s"].values())
    for tier, size in (("l1", "used_bytes"), ("l2", "peak_bytes")):
        assert 0 < document[tier][size] <= document[tier]["budget_bytes"]
        assert document[tier]["budget_bytes"] == document["model"]["expert_bytes"] // 4
        assert document[tier]["hits"] > 0
        assert document[tier]["misses"] > document[tier]["evictions"] > 0
    assert document["file"]["bytes_read"] > 0
    assert document["load"]["expert_bytes_read"] == 0
    assert document["rss_peak_bytes"] <= document["rss_limit_bytes"]
    assert document["plugin"] == {"api_version": 3, "ggml_version": "0.26.0"}
