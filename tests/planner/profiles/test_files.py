"""Profiles of recordings, and layers' weights from text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.planner.profiles.of_trace import count_uses, reuse_distances
from expertier.planner.profiles.text_form import read_layer_weights, weights_of
from expertier.planner.traces.trace import trace_from_ids

uses_of = st.lists(st.permutations(range(5)).map(lambda p: p[:2]), min_size=1, max_size=40)


@given(uses_of, st.integers(0, 40))
def test_uses_and_distances_are_those_counted_by_hand(steps: list[list[int]], cut: int) -> None:
    ids = np.array([[step, step[::-1]] for step in steps])
    cut = min(cut, len(ids))
    trace = trace_from_ids(ids, np.array([0, cut, len(ids)]), n_experts=5)
    uses = count_uses(trace)
    distances = reuse_distances(trace)
    for layer in range(2):
        order = ids[:, layer].ravel().tolist()
        assert uses[layer].tolist() == [order.count(expert) for expert in range(5)]
        found = [0] * 6
        for begin, end in ((0, 2 * cut), (2 * cut, len(order))):
            for i in range(begin, end):
                before = [j for j in range(begin, i) if order[j] == order[i]]
                found[len(set(order[before[-1] + 1 : i])) if before else 5] += 1
        assert distances[layer].tolist() == found


def test_weights_are_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text("# of a model\n\nblk.3 0.5\nblk.4\t2  # twice\nblk.10 0\n")
    weights = read_layer_weights(path)
    assert weights == {3: 0.5, 4: 2.0, 10: 0.0}
    assert weights_of(weights, [3, 4, 10]) == (0.5, 2.0, 0.0)
    with pytest.raises(ConfigError, match=r"blk. \[5\] without a weight, blk. \[10\] not in the model"):
        weights_of(weights, [3, 4, 5])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("blk.x 1", "line 2: 'blk.x 1'"),
        ("blk.1", "line 2: 'blk.1'"),
        ("blk.1 1 1", "line 2: 'blk.1 1 1'"),
        ("layer 1", "line 2"),
        ("blk.1 -1", "line 2: the weight is '-1'"),
        ("blk.1 nan", "line 2: the weight is 'nan'"),
        ("blk.1 inf", "line 2: the weight is 'inf'"),
        ("blk.1 one", "line 2: the weight is 'one'"),
        ("blk.0 2", r"line 2: blk.0 has a weight already, 1.0"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "profile.txt"
    path.write_text(f"blk.0 1\n{line}\nblk.2 1\n")
    with pytest.raises(ConfigError, match=words):
        read_layer_weights(path)


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, words in (("empty", "empty"), ("bytes", "not text"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=words):
            read_layer_weights(tmp_path / name)
