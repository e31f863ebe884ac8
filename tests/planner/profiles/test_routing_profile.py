"""Routing profiles as objects and files: what is counted, that files keep it, and that other models' are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.planner import LayerDemand, plan_layers
from expertier.planner.profiles.file import FORMAT, read_profile, write_profile
from expertier.planner.profiles.of_trace import count_uses, reuse_distances
from expertier.planner.profiles.routing_profile import RoutingProfile, default_phase, profile_of
from expertier.planner.profiles.summary import summarize
from expertier.planner.traces.archive import write_trace
from expertier.planner.traces.recorder import RoutingRecorder
from expertier.planner.traces.trace import Phase, Trace, trace_from_ids

ids_of = st.lists(st.permutations(range(6)).map(lambda p: [p[:2], p[2:4]]), min_size=1, max_size=30)


def recording(blocks: tuple[int, ...] = (1, 2), n_experts: tuple[int, ...] = (4, 3)) -> Trace:
    """A prompt of 9 rows that uses all experts, then 20 decode steps that use few."""
    recorder = RoutingRecorder(n_experts, blocks, [10] * len(blocks), rows_at_once=512)
    recorder.add([(layer, range(n)) for layer, n in enumerate(n_experts)], Phase.PREFILL, 9)
    for step in range(20):
        recorder.add([(layer, [step % 2, n - 1]) for layer, n in enumerate(n_experts)], Phase.DECODE, 1)
    return recorder.trace()


@given(ids_of)
def test_a_file_keeps_a_profile(tmp_path_factory: pytest.TempPathFactory, ids: list[list[list[int]]]) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.npz"
    trace = trace_from_ids(np.array(ids), n_experts=6)
    write_profile(path, profile_of(trace, "it"))
    found = read_profile(path).experts
    assert found is not None
    assert np.array_equal(found.uses, count_uses(trace))
    assert np.array_equal(found.reuse_distances, reuse_distances(trace))
    assert found.n_experts.tolist() == [6, 6]
    assert found.blocks.tolist() == [0, 1]
    assert found.calls == 2 * len(ids)


def test_decode_alone_counts_where_there_is_some(tmp_path: Path) -> None:
    trace = recording()
    decode = profile_of(trace, "it", default_phase(trace)).experts
    prefill = profile_of(trace, "it", Phase.PREFILL).experts
    both = profile_of(trace, "it").experts
    assert decode is not None
    assert prefill is not None
    assert both is not None
    assert decode.uses.tolist() == [[10, 10, 0, 20], [10, 10, 20, 0]]
    assert prefill.uses.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert np.array_equal(both.uses, decode.uses + prefill.uses)
    write_trace(tmp_path / "t.npz", trace)
    read = read_profile(tmp_path / "t.npz").experts
    assert read is not None
    assert np.array_equal(read.uses, decode.uses)
    only_prompt = trace.section(0, 2)
    assert default_phase(only_prompt) is None
    with pytest.raises(ConfigError, match="it: it has no calls of decode"):
        profile_of(only_prompt, "it", Phase.DECODE)


@pytest.mark.parametrize(
    ("blocks", "n_experts"), [([1, 2, 3], [4, 3, 3]), ([1, 2], [4, 4]), ([0, 2], [4, 3]), ([1], [4])]
)
def test_a_profile_of_another_model_is_refused(blocks: list[int], n_experts: list[int]) -> None:
    profile = profile_of(recording(), "p.npz")
    assert profile.warm_uses([1, 2], [4, 3]) is not None
    with pytest.raises(
        ConfigError, match=r"p\.npz: a profile of 2 layers \(blk\.1 to blk\.2\) of 3 to 4 experts"
    ):
        profile.plan_uses(blocks, n_experts)


def test_ids_alone_count_layers_from_0() -> None:
    profile = profile_of(trace_from_ids(np.array([[[0, 1], [3, 2]]]), n_experts=4), "ids")
    uses = profile.warm_uses([3, 7], [4, 4])
    assert uses is not None
    assert uses.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_weights_of_layers_give_slots_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "w.txt"
    path.write_text("\n# weights\nblk.0 1\nblk.1 2\nblk.2 4\n")
    profile = read_profile(path)
    assert profile.warm_uses([0, 1, 2], [64] * 3) is None
    demands = [LayerDemand(layer=n, n_experts=64, top_k=2, slot_bytes=10, fixed_bytes=0) for n in range(3)]
    plan = plan_layers(demands, budget_bytes=10 * 70, profile=profile.plan_uses([0, 1, 2], [64] * 3))
    assert plan.slots == (10, 20, 40)
    with pytest.raises(
        ConfigError, match=r"w\.txt: .* blk\. \[3\] without a weight, blk\. \[2\] not in the model"
    ):
        profile.plan_uses([0, 1, 3], [64] * 3)
    with pytest.raises(ConfigError, match="give it as --profile itself"):
        write_profile(tmp_path / "out.npz", profile)
    assert summarize(profile)["per_layer"][2] == {"block": 2, "weight": 4.0}


def test_the_summary_is_of_this_recording() -> None:
    summary = summarize(profile_of(recording(), "it", Phase.DECODE))
    assert summary["uses"] == 80
    first = summary["per_layer"][0]
    assert (first["block"], first["unused"], first["hottest"], first["hottest_share"]) == (1, 1, 3, 0.5)
    assert first["experts_for"] == {"0.5": 1, "0.8": 3, "0.95": 3}
    # 0, 3, 1, 3, 0, ...: expert 3 has one other between two uses, 0 and 1 have two.
    assert first["median_reuse_distance"] == 1
    assert summary["lru_hit_rates"]["0.75"] == pytest.approx((37 + 19) / 80)  # 3 slots of 4, 2 of 3
    assert summary["held_hit_rates"]["0.5"] == pytest.approx((30 + 20) / 80)


def broken(path: Path, **changed: object) -> Path:
    """Write a profile with some members changed; None leaves one out."""
    arrays: dict[str, object] = {
        "format": np.array(FORMAT),
        "blocks": np.array([0, 1]),
        "n_experts": np.array([2, 3]),
        "uses": np.array([[1, 2, 0], [1, 2, 3]]),
        "reuse_distances": np.zeros((2, 4), np.int64),
        "calls": np.array(5),
    } | changed
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": np.array("expertier-profile-9")}, "format 'expertier-profile-9'"),
        ({"uses": None}, "`uses` missing"),
        ({"uses": np.zeros((2, 4), int)}, "`uses` has the shape"),
        ({"uses": np.array([[1, -2, 0], [1, 2, 3]])}, "not integers of 0 and more"),
        ({"uses": np.array([[1, 2, 1], [1, 2, 3]])}, "counts experts that their layers do not have"),
        ({"uses": np.zeros((2, 3))}, "`uses` is float64"),
        ({"blocks": np.array([1, 1])}, "`blocks` must rise"),
        ({"n_experts": np.array([0, 3])}, "must name 1 to"),
        ({"n_experts": np.array([], int)}, "must name 1 to"),
        ({"reuse_distances": np.zeros((2, 3), int)}, "`reuse_distances` has the shape"),
        ({"calls": np.array([1])}, "`calls` is int64"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    path = broken(tmp_path / "bad.npz", **changed)
    with pytest.raises(ConfigError, match=r"bad\.npz: .*" + words):
        read_profile(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    whole = broken(tmp_path / "whole.npz")
    read_profile(whole)
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole.read_bytes()[:-60])
    with pytest.raises(ConfigError, match=r"cut\.npz"):
        read_profile(cut)
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("readme", "nothing")
    with pytest.raises(ConfigError, match=r"other\.npz"):
        read_profile(tmp_path / "other.npz")
    with pytest.raises(ConfigError, match=r"none\.npz: No such file"):
        read_profile(tmp_path / "none.npz")
    (tmp_path / "line.txt").write_text("blk.0 1\nblk.1 x\n")
    with pytest.raises(ConfigError, match=r"line\.txt, line 2: the weight is 'x'"):
        read_profile(tmp_path / "line.txt")
    (tmp_path / "line.csv").write_text("phase,step,layer,expert\n1,0,0,0\n1,0,0,x\n")
    with pytest.raises(ConfigError, match=r"line\.csv, line 3: expert is 'x'"):
        read_profile(tmp_path / "line.csv")


def test_a_profile_is_of_experts_or_of_layers() -> None:
    with pytest.raises(AssertionError):
        RoutingProfile("neither")
