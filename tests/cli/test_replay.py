"""`expertier replay`, as a user runs it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from expertier.engine_adapter.models.synth import TINY_SHAPE
from expertier.planner.traces.archive import write_trace
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.recorder import RoutingRecorder
from expertier.planner.traces.trace import Phase
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB

POLICIES = {"lfu-decay", "lru", "lru-global", "belady"}
FIELDS = {
    "policy", "lookups", "hits", "misses", "hit_rate", "decode_hit_rate", "bytes_in", "gap_closed", "lookups_per_s",
    "bytes_l2_to_l1", "bytes_file_to_l2", "evictions", "l2_evictions",
}  # fmt: skip


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """Two sequences of 150 steps, 3 layers, top-2 of 16, with some locality; no bytes."""
    random = np.random.default_rng(0)
    heat = random.standard_normal((3, 16))
    steps = []
    for _ in range(300):
        heat = 0.9 * heat + 0.4 * random.standard_normal((3, 16))
        steps.append(np.argsort(-heat, axis=1)[:, :2])
    path = tmp_path_factory.mktemp("replay") / "ids.npz"
    np.savez(path, ids=np.array(steps, np.uint8), offsets=np.array([0, 150, 300]))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of a prompt of 40 rows and 60 decode steps, 2 layers of experts of 1 MiB."""
    random = np.random.default_rng(1)
    recorder = RoutingRecorder([8, 8], [0, 1], [1 << 20] * 2, rows_at_once=512)
    for phase, rows, n in [(0, 40, 8), *[(1, 1, 2)] * 60]:
        recorder.add([(layer, random.permutation(8)[:n].tolist()) for layer in (0, 1)], phase, rows)
    path = tmp_path_factory.mktemp("replay") / "recorded.npz"
    write_trace(path, recorder.trace())
    return path


def test_all_policies_side_by_side(expertier, ids):
    ended = expertier("replay", ids, "--slots", 4, "--json")
    assert ended.status == 0, ended.err
    document = ended.document
    by_name = {row["policy"]: row for row in document["policies"]}
    assert set(by_name) >= POLICIES
    for row in by_name.values():
        assert set(row) >= FIELDS
        assert row["hits"] + row["misses"] == row["lookups"] == 300 * 3 * 2
        assert row["hit_rate"] == row["decode_hit_rate"] == row["hits"] / row["lookups"]
        assert row["bytes_in"] is None
        assert row["lookups_per_s"] > 0
    assert by_name["belady"]["misses"] < min(by_name[name]["misses"] for name in ("lfu-decay", "lru"))
    assert (by_name["lru"]["gap_closed"], by_name["belady"]["gap_closed"]) == (0, 1)
    gap = by_name["lru"]["misses"] - by_name["belady"]["misses"]
    closed = (by_name["lru"]["misses"] - by_name["lfu-decay"]["misses"]) / gap
    assert by_name["lfu-decay"]["gap_closed"] == pytest.approx(closed)

    table = expertier("replay", ids, "--slots", 4)
    assert table.status == 0
    for name in POLICIES:
        assert f"{100 * by_name[name]['hit_rate']:.2f} %" in table.out
        assert f"{by_name[name]['misses']:,}" in table.out


def test_one_policy_stands_at_the_top(expertier, recorded):
    arguments = ("replay", recorded, "--budget-mib", 9, "--policy", "lru", "--pool-mib", 12)
    document = expertier(*arguments, "--json").document
    assert set(document) >= FIELDS
    assert document["policy"] == "lru"
    assert document["slots"] == [5, 4]
    assert document["bytes_in"] == document["misses"] << 20
    assert document["bytes_l2_to_l1"] + document["bytes_file_to_l2"] == document["bytes_in"]
    assert document["bytes_l2_to_l1"] > 0
    assert document["hit_rate"] < document["decode_hit_rate"]
    assert "run in groups" in document["notes"][0]
    assert "run in groups" in expertier(*arguments).out


@pytest.mark.parametrize("n_slots", [pytest.param(3, marks=pytest.mark.deep), 12])
def test_a_recorded_run_replays_as_it_ran(expertier, tiny, tmp_path, n_slots):
    budget = sum(demand.bytes_for(n_slots) for demand in ExpertTable.from_gguf(tiny).layer_demands())
    path = tmp_path / "routing.npz"
    arguments = ("-p", "a few words", "-n", 12, "-t", 1, "--ubatch", 4, "--record-routing", path, "--json")
    ran = expertier("run", tiny, *arguments, "--expert-cache-mib", budget / MIB, "--host-pool-mib", 0)
    assert ran.status == 0, ran.err
    ran = ran.document
    assert set(ran["text"])
    for policy in ("lfu-decay", "belady"):
        found = expertier("replay", path, "--slots", n_slots, "--policy", policy, "--json").document
        assert found["layers"] == TINY_SHAPE.layers
        assert found["lookups"] == ran["l1"]["hits"] + ran["l1"]["misses"]
        if policy == "lfu-decay":
            assert (found["hits"], found["misses"]) == (ran["l1"]["hits"], ran["l1"]["misses"])
            assert found["evictions"] == ran["l1"]["evictions"]
            assert found["bytes_in"] == ran["l1"]["bytes_in"]
    trace = read_trace(path)
    trace.check_valid()
    prefill, decode = (trace.rows[trace.phase == phase] for phase in Phase)
    assert set(decode.tolist()) == {1}
    assert prefill.max() == 4, "as many rows as a ubatch"
    assert len(decode) == ran["generated_tokens"] * TINY_SHAPE.layers


def test_a_recording_that_cannot_be_written_is_refused_first(expertier, tiny, tmp_path):
    ended = expertier("run", tiny, "-p", "x", "-n", 1, "--record-routing", tmp_path / "none" / "a.npz")
    ended.must_refuse("recorded routing cannot be written", "none/a.npz", "make the folder")


@pytest.mark.deep
def test_what_is_played_can_be_chosen(expertier, ids):
    def misses(*arguments):
        return expertier("replay", ids, "--slots", 4, "--policy", "lru", "--json", *arguments).document[
            "misses"
        ]

    whole, cold = misses(), misses("--cold")
    assert whole < cold == misses("--sequence", 0) + misses("--sequence", 1)
    document = expertier(
        "replay", ids, "--slots", 16, "--policy", "lru", "--json", "--decode-rows", 3, "--expert-bytes", 10
    ).document
    assert document["calls"] == 300
    assert document["bytes_in"] == 10 * document["misses"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--slots", "--budget-mib")),
        (("--slots", 4, "--budget-mib", 4), ("either --slots",)),
        (("--slots", 0), ("0 slots a layer",)),
        (("--slots", 4, "--policy", "fifo"), ("'fifo'", "lfu-decay", "belady")),
        (("--slots", 4, "--pool-mib", 4), ("--expert-bytes",)),
        (("--budget-mib", 4), ("--expert-bytes",)),
        (("--budget-mib", "nan"), ("--budget-mib is nan",)),
        (("--budget-mib", 1, "--expert-bytes", 1 << 20), ("give at least 3 MiB",)),
        (("--slots", 4, "--sequence", 2), ("sequence 2", "it has 2")),
        (("--slots", 4, "--decode-rows", 0), ("--decode-rows is 0",)),
        (("--slots", 4, "--expert-bytes", 0), ("--expert-bytes is 0",)),
    ],
)
def test_wrong_options(expertier, ids, arguments, words):
    expertier("replay", ids, *arguments).must_refuse(*words)


def test_wrong_files(expertier, tmp_path, recorded):
    expertier("replay", tmp_path / "none.npz", "--slots", 4).must_refuse("none.npz", "No such file")
    broken = tmp_path / "a.csv"
    broken.write_text("phase,step,layer,expert\n1,0,0,5\n1,0,0,x\n")
    expertier("replay", broken, "--slots", 4).must_refuse("line 3", "expert is 'x'")
    expertier("replay", recorded, "--slots", 4, "--expert-bytes", 5).must_refuse("leave --expert-bytes out")


def test_a_budget_in_bytes_plays_a_recording_as_read(expertier, recorded):
    rows = json.loads(expertier("replay", recorded, "--budget-mib", 16, "--json").out)["policies"]
    for row in rows:
        assert row["misses"] == 16, "everything fits, so each expert misses once"
        assert row["gap_closed"] is None
