"""`expertier plan`, as a user runs it: ledgers, slots, what limits them, predictions, plots."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import write_model
from expertier.planner.traces.archive import write_trace
from expertier.planner.traces.recorder import RoutingRecorder
from expertier.testing.fake_device import FakeDevice
from expertier.tiers.engine.prefill_stream import N_STREAMED_LAYERS
from expertier.tiers.model.table import ExpertTable
from expertier.units import GIB, MIB
from servers.commands import command

QWEN = ModelShape(
    layers=48, experts=128, top_k=8, n_embd=2048, n_ff=768, heads=32, kv_heads=4, head_dim=128, vocab=151936, seed=1,
    gate_up_type="Q4_K", down_type="Q6_K", dense_type="Q8_0", context_length=131072,
)  # fmt: skip


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Run `expertier ARGUMENTS` in this process: planning needs no engine, and processes would take minutes."""
    for name in [name for name in os.environ if name.startswith("MOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))

    return command


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A model the size of Qwen3-30B-A3B: a header, and holes in the place of 19 GiB of weights."""
    path = write_model(tmp_path_factory.mktemp("plan") / "qwen.gguf", QWEN, holes=True)
    assert path.stat().st_size > 18 * GIB
    assert path.stat().st_blocks * 512 < 64 * MIB, "a file system without holes"
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of 80 decode steps of that model's shape."""
    random = np.random.default_rng(1)
    recorder = RoutingRecorder([128] * 48, list(range(48)), [1 << 21] * 48, rows_at_once=512)
    heat = random.standard_normal((48, 128))
    for _ in range(80):
        heat = 0.9 * heat + 0.4 * random.standard_normal((48, 128))
        chosen = np.argsort(-heat, axis=1)[:, :8]
        recorder.add([(layer, chosen[layer].tolist()) for layer in range(48)], 1, 1)
    path = tmp_path_factory.mktemp("plan") / "recorded.npz"
    write_trace(path, recorder.trace())
    return path


CARD = ("--vram", "16GiB", "--ram", "32GiB", "--ctx", "32768")


def test_a_card(ours, qwen):
    document = ours("plan", qwen, *CARD, "--json").document
    (ledger,) = document["devices"]
    assert "host pool" in document["notes"][0], "it is smaller than the arena"
    assert sum(ledger["entries"].values()) + ledger["unused_bytes"] == ledger["total_bytes"] == 16 * GIB
    assert ledger["entries"]["kv"] == 3 * GIB
    assert document["limited_by"] == ["reserve"]
    assert len(document["slots"]) == 48
    assert all(
        8 <= wide <= narrow <= 128
        for wide, narrow in zip(document["slots_wide"], document["slots"], strict=True)
    )
    assert document["arena_bytes"] <= ledger["arena_narrow_bytes"]
    assert sum(document["ram"]["entries"].values()) + document["ram"]["unused_bytes"] == 32 * GIB
    for name in ("decode_tokens_per_s", "prefill_tokens_per_s"):
        speed = document[name]
        assert 0 < speed["low"] <= speed["predicted"] <= speed["high"]
    assert document["savings"]["saved_by_one_more_gib"] > 0
    assert "other models" in document["hit_rate_source"]
    assert "assumed" in document["rates_source"]

    text = ours("plan", qwen, *CARD)
    assert text.status == 0, text.err
    for words in ("arena", "limited by reserve", "kv", "tokens/s", "assumed for the card", "one more GiB"):
        assert words in text.out


def test_what_an_engine_stages_on_a_card_is_planned_for(ours, qwen, monkeypatch):
    (ledger,) = ours("plan", qwen, *CARD, "--json").document["devices"]
    layer_bytes = max(
        layout.range_bytes(128) for layout in ExpertTable.from_gguf(qwen).slot_layouts
    )  # a layer with all its experts
    assert ledger["entries"]["prefill stream"] == N_STREAMED_LAYERS * layer_bytes
    monkeypatch.setenv("MOE_PREFILL_STREAM_TOKENS", "0")
    (without,) = ours("plan", qwen, *CARD, "--json").document["devices"]
    assert without["entries"]["prefill stream"] == 0
    assert without["entries"]["arena"] > ledger["entries"]["arena"]


def test_a_card_of_this_machine(ours, tiny, monkeypatch):
    opened = []

    class FakeCard(FakeDevice):
        name = "cuda:0"

    def open_fake(name):
        opened.append(name)
        return FakeCard()

    monkeypatch.setattr("expertier.cli.plan_command.open_device", open_fake)
    document = ours("plan", tiny, "--device", "auto", "--ram", "2GiB", "--json").document
    assert opened == ["auto"]
    assert document["devices"][0]["total_bytes"] == FakeDevice().free_bytes()
    assert "assumed" in document["rates_source"]
    monkeypatch.undo()
    assert ours("plan", tiny, "--device", "host", "--ram", "2GiB", "--json").document["devices"] == []
    ours("plan", tiny, "--device", "hip:9", "--vram", "1GiB").must_refuse("either --vram")


def test_a_card_whose_engine_does_not_compute_in_the_slab_has_no_more_slots_while_batches_are_narrow(
    ours, qwen, monkeypatch
):
    def planned(name, wish):
        device = FakeDevice(name=name, capacity_bytes=16 * GIB)
        monkeypatch.setattr("expertier.cli.plan_command.open_device", lambda _: device)
        monkeypatch.setenv("MOE_SLAB_COMPUTE", wish)
        return ours("plan", qwen, "--device", name, "--ram", "32GiB", "--json").document

    for name, wish in (("hip:0", "auto"), ("cuda:0", "0")):
        document = planned(name, wish)
        assert document["slots"] == document["slots_wide"]
    for name, wish in (("hip:0", "1"), ("cuda:0", "auto")):
        document = planned(name, wish)
        assert sum(document["slots"]) > sum(document["slots_wide"])


def test_a_pair_shares_the_layers(ours, qwen):
    document = ours("plan", qwen, "--vram", "8GiB", "--devices", 2, "--ram", "32GiB", "--json").document
    first, second = document["devices"]
    assert first["total_bytes"] == second["total_bytes"] == 8 * GIB
    assert second["entries"]["weights"] > first["entries"]["weights"], "the output lies on the last one"
    one = ours("plan", qwen, "--vram", "8GiB", "--ram", "32GiB", "--json").document
    for consumer in ("weights", "kv"):
        assert (
            first["entries"][consumer] + second["entries"][consumer] == one["devices"][0]["entries"][consumer]
        )
    assert sum(document["slots"]) > sum(one["slots"])


def test_a_pair_that_shares_tensors_is_not_planned_as_one_that_shares_layers(ours, qwen, monkeypatch):
    monkeypatch.setenv("MOE_SPLIT_MODE", "tensor")
    ours("plan", qwen, "--vram", "8GiB", "--devices", 2).must_refuse("--devices 2", "set it to `layer`")
    assert ours("plan", qwen, "--vram", "8GiB", "--ram", "32GiB", "--json").document["devices"]


def test_more_room_never_makes_it_worse(ours, qwen):
    documents = [
        ours("plan", qwen, "--vram", size, "--ram", "32GiB", "--json").document
        for size in ("8GiB", "12 GB", "40GiB")
    ]
    shares = [document["share_of_experts"] for document in documents]
    speeds = [document["decode_tokens_per_s"]["predicted"] for document in documents]
    assert shares == sorted(shares)
    assert speeds == sorted(speeds)
    assert shares[-1] == 1
    assert documents[-1]["limited_by"] == ["slots"]
    assert documents[-1]["hit_rate"] == 1


def test_recordings_and_profiles(ours, qwen, recorded, tmp_path):
    base = ("plan", qwen, "--vram", "10GiB", "--ram", "32GiB", "--json")
    traced = ours(*base, "--trace", recorded).document
    assert "replayed through lfu-decay" in traced["hit_rate_source"]
    profile = tmp_path / "profile.npz"
    assert ours("profile", "make", recorded, "-o", profile).status == 0
    profiled = ours(*base, "--profile", profile).document
    assert "reuse distances" in profiled["hit_rate_source"]
    assert len(set(profiled["slots"])) > 2, "slots go where the profile says"
    assert abs(profiled["hit_rate"] - traced["hit_rate"]) < 0.15
    ours("plan", qwen, *CARD, "--trace", tmp_path / "none.npz").must_refuse("none.npz")


def test_the_host_and_its_bounds(ours, tiny):
    document = ours("plan", tiny, "--ram", "2GiB", "--json").document
    assert document["devices"] == []
    assert document["ram"]["entries"]["arena"] > 0
    capped = ours("plan", tiny, "--ram", "2GiB", "--cap-mib", 1, "--json").document
    assert capped["ram"]["entries"]["arena"] <= MIB
    card = ("plan", tiny, "--vram", "1GiB", "--ram", "2GiB", "--json")
    assert ours(*card, "--rail-mib", 300).document["devices"][0]["entries"]["reserve"] == 300 * MIB
    assert ours(*card, "--headroom-mib", 5).document["devices"][0]["entries"]["headroom"] == 5 * MIB
    assert ours(*card, "--cap-mib", 1).document["limited_by"] == ["cap"]
    assert ours(*card, "--expert-cache-mib", 2).document["limited_by"] == ["pool"]


def test_what_cannot_be(ours, qwen, tiny, tmp_path, monkeypatch):
    ours("plan", qwen, "--vram", "4GiB", "--ram", "32GiB", "--ctx", 131072).must_refuse(
        "kv (", "give it at least", "lower the context length"
    )
    ours("plan", tiny, "--vram", "much").must_refuse("--vram is 'much'", "16GiB")
    ours("plan", tiny, "--vram", "0").must_refuse("--vram is '0'")
    ours("plan", tiny, "--devices", 2).must_refuse("--devices 2 needs --vram")
    ours("plan", tiny, "--vram", "1GiB", "--devices", 99).must_refuse("99 devices for 4 layers")
    ours("plan", tiny, "--kv-type", "q1").must_refuse("--kv-type is 'q1'", "q8_0")
    ours("plan", tiny, "--plot", tmp_path / "plan.gif").must_refuse("ends with .png or .html")
    pretend(monkeypatch, installed=True)
    ours("plan", tiny, "--plot", tmp_path / "no" / "plan.png").must_refuse("make the folder")
    ours("plan", tmp_path / "none.gguf").must_refuse("none.gguf")


def pretend(monkeypatch, installed):
    """Make matplotlib and plotly look `installed`, or not installed."""
    find = importlib.util.find_spec

    def found(name, package=None):
        if name in ("matplotlib", "plotly"):
            return object() if installed else None
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize(("suffix", "package"), [("png", "matplotlib"), ("html", "plotly")])
def test_without_the_extra(ours, tiny, tmp_path, monkeypatch, suffix, package):
    pretend(monkeypatch, installed=False)
    ended = ours("plan", tiny, "--plot", tmp_path / f"p.{suffix}")
    ended.must_refuse(package, "pip install 'expertier[plot]'")


@pytest.mark.parametrize(("suffix", "package"), [("png", "matplotlib"), ("html", "plotly")])
def test_plots(ours, qwen, recorded, tmp_path, suffix, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = tmp_path / f"plan.{suffix}"
    ended = ours("plan", qwen, *CARD, "--trace", recorded, "--plot", path, "--json")
    assert ended.status == 0, ended.err
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<html>")
    assert len(content) > 20_000
    curve = ended.document["curve"]
    arenas = [point["arena_bytes"] for point in curve]
    assert arenas == sorted(arenas)
    assert ended.document["arena_bytes"] in arenas, "the chosen point is on the curve"
    assert all(point["optimum"] >= point["hit_rate"] - 0.05 for point in curve)
    assert curve[-1]["decode"]["predicted"] >= curve[0]["decode"]["predicted"]


def test_a_model_of_another_architecture_says_what_is_estimated(ours, tmp_path):
    shape = replace(
        QWEN, architecture="gpt-oss", layers=2, experts=8, top_k=2, n_embd=256, n_ff=256, heads=4, vocab=300,
        gate_up_type="MXFP4", down_type="MXFP4", head_dim=64,
    )  # fmt: skip
    path = write_model(tmp_path / "m.gguf", shape, holes=True)
    document = ours("plan", path, "--vram", "2GiB", "--ram", "4GiB", "--ctx", 8192, "--json").document
    assert document["notes"] == []
    full = ours(
        "plan", path, "--vram", "2GiB", "--ram", "4GiB", "--ctx", 8192, "--full-windows", "--json"
    ).document
    assert full["devices"][0]["entries"]["kv"] > document["devices"][0]["entries"]["kv"]
    assert json.dumps(document)


@pytest.fixture
def ready_cache(tmp_path):
    """A cache folder without a plugin, for `expertier`: none of this needs the engine."""
    return str(tmp_path / "cache")


def test_as_a_user_runs_it(expertier, tiny):
    """In a process of its own: the exit code, and where errors go."""
    expertier("plan", tiny, "--vram", "much").must_refuse("--vram is 'much'")
