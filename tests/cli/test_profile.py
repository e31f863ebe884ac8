"""`expertier profile`, and runs that begin with one."""

from __future__ import annotations

import numpy as np
import pytest

from expertier.planner.profiles.file import read_profile
from expertier.planner.traces.file import read_trace
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """60 steps, 2 layers, top-2 of 8; the last expert never occurs."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("profile") / "ids.npz"
    np.savez(path, ids=np.array([[random.permutation(7)[:2] for _ in range(2)] for _ in range(60)]))
    return path


def test_made_and_shown(expertier, ids, tmp_path):
    path = tmp_path / "p.npz"
    made = expertier("profile", "make", ids, "-o", path, "--experts", 8, "--json")
    assert made.status == 0, made.err
    shown = expertier("profile", "show", path, "--json").document
    assert shown["uses"] == made.document["uses"] == 60 * 2 * 2
    assert [row["experts"] for row in shown["per_layer"]] == [8, 8]
    assert all(row["unused"] == 1 for row in shown["per_layer"])
    text = expertier("profile", "show", path)
    assert text.status == 0
    assert "blk.1" in text.out
    assert f"{100 * shown['per_layer'][1]['hottest_share']:.4g} %" in text.out
    # What `make` reads, `show` reads as well.
    assert expertier("profile", "show", ids, "--json").document["uses"] == 240


def test_weights_of_layers_are_shown(expertier, tmp_path):
    path = tmp_path / "w.txt"
    path.write_text("blk.3 0.5\nblk.4 2\n")
    assert expertier("profile", "show", path, "--json").document["per_layer"][1] == {
        "block": 4,
        "weight": 2.0,
    }
    assert "blk.4" in expertier("profile", "show", path).out


@pytest.mark.deep
def test_what_cannot_be_made_or_read(expertier, ids, tmp_path):
    out = tmp_path / "p.npz"
    expertier("profile", "make", ids, "-o", out, "--experts", 5).must_refuse("names expert 6", "give 7 to")
    expertier("profile", "make", ids, "-o", out, "--phase", "all the time").must_refuse(
        "decode, prefill, all"
    )
    expertier("profile", "make", ids, "-o", out, "--phase", "prefill").must_refuse("no calls of prefill")
    expertier("profile", "make", ids, "-o", tmp_path / "none" / "p").must_refuse("cannot be written")
    (tmp_path / "w.txt").write_text("blk.0 1\nblk.1\n")
    expertier("profile", "show", tmp_path / "w.txt").must_refuse("line 2")
    expertier("profile", "make", tmp_path / "w.txt", "-o", out).must_refuse("this is a profile")
    assert not out.exists()


@pytest.mark.deep
def test_a_run_begins_with_the_profile_of_the_run_before(expertier, tiny, tmp_path):
    table = ExpertTable.from_gguf(tiny)
    budget = sum(demand.bytes_for(8) for demand in table.layer_demands()) / MIB
    routing, profile = tmp_path / "routing.npz", tmp_path / "p.npz"
    run = (
        "run",
        tiny,
        "-p",
        "a few words",
        "-n",
        12,
        "-t",
        1,
        "--expert-cache-mib",
        budget,
        "--host-pool-mib",
        0,
    )
    cold = expertier(*run, "--record-routing", routing, "--json")
    assert cold.status == 0, cold.err
    assert expertier("profile", "make", routing, "-o", profile).status == 0
    made = read_profile(profile).experts
    assert made is not None
    assert made.calls == int((read_trace(routing).phase == 1).sum()) == 12 * table.n_layers
    for arguments, env in (
        ((*run, "--profile", profile, "--json"), {}),
        ((*run, "--json"), {"MOE_PROFILE": str(profile)}),
    ):
        warm = expertier(*arguments, env=env)
        assert warm.status == 0, warm.err
        assert warm.document["text"] == cold.document["text"]
        assert warm.document["prefetch"]["asked"] > 0
        assert warm.document["l1"]["slots"] == cold.document["l1"]["slots"]


def test_a_profile_of_another_model_is_refused(expertier, tiny, ids):
    ended = expertier("run", tiny, "-p", "x", "-n", 1, "--profile", ids)
    ended.must_refuse("a profile of 2 layers", "the model has", "make it from a recording of this model")
