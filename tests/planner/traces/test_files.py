"""Recorded routing as files: what is read is what was written, and broken files are named with what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.planner.traces.archive import FORMAT, write_trace
from expertier.planner.traces.csv_file import parse_csv
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.recorder import RoutingRecorder
from expertier.planner.traces.trace import Phase, Trace, trace_from_ids

HEADER = """\
# route_trace v1
# model=a.gguf arch=x n_layer=4 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=7
# layer=1 expert_bytes=100 dense_bytes=7
# layer=3 expert_bytes=200 dense_bytes=7
"""
COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
ROWS = """\
0,0,0,1,0,5,0.6,0,100
0,0,0,1,1,2,0.4,0,100
0,0,1,1,0,5,0.7,1,0
0,0,1,1,1,3,0.3,0,100
0,0,0,3,0,0,1,0,200
0,0,1,3,0,7,1,0,200
0,1,2,1,0,5,0.7,1,0
0,1,2,3,0,0,0.7,1,0
"""


def same(left: Trace, right: Trace) -> None:
    """Assert that two traces are equal but for `resident`."""
    for name in ("layer", "step", "phase", "rows", "bounds", "experts", "sequences", "n_experts", "blocks"):
        assert getattr(left, name).tolist() == getattr(right, name).tolist(), name
    sizes = [None if t.expert_bytes is None else t.expert_bytes.tolist() for t in (left, right)]
    assert sizes[0] == sizes[1]


def test_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + COLUMNS + ROWS)
    trace = read_trace(path)
    trace.check_valid()
    assert trace.blocks.tolist() == [1, 3], "layers with experts"
    assert trace.expert_bytes is not None
    assert trace.expert_bytes.tolist() == [100, 200]
    assert trace.n_experts.tolist() == [8, 8]
    assert trace.layer.tolist() == [0, 0, 1, 1, 0, 1], "in the order of the lines"
    assert trace.step.tolist() == [0, 1, 0, 1, 2, 2]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.lengths.tolist() == [2, 2, 1, 1, 1, 1]
    assert trace.experts.tolist() == [5, 2, 5, 3, 0, 7, 5, 0]
    assert trace.ascending().tolist() == [2, 5, 3, 5, 0, 7, 5, 0]
    assert trace.resident is not None
    assert trace.resident.tolist() == [0, 0, 1, 0, 0, 0, 1, 1]


def test_a_csv_may_say_less_and_in_another_order() -> None:
    trace = parse_csv("x", ["expert,layer,step,phase\n", "\n", "4,0,0,1\n", "1,0,0,1\r\n", "2,0,1,1"])
    assert trace.experts.tolist() == [4, 1, 2]
    assert trace.lengths.tolist() == [2, 1]
    assert (trace.expert_bytes, trace.resident) == (None, None)
    assert trace.n_experts.tolist() == [5]


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (5, "# layer=1 expert_bytes=9", r"line 5: layer 1 is described a second time"),
        (4, "# layer=1 expert_bytes=many", r"line 4: expert_bytes is 'many'"),
        (6, "turn,phase,step,layer", r"line 6: .* expert missing"),
        (6, "turn,phase,step,layer,expert,expert", r"line 6: a column is named twice"),
        (8, "0,0,0,1,1,2", r"line 8: 6 fields for 9 columns"),
        (8, "0,0,0,1,1,2,0.4,0,100,", r"line 8: 10 fields for 9 columns"),
        (8, "0,0,0,1,1,x,0.4,0,100", r"line 8: expert is 'x'"),
        (8, "0,0,0,1,1,-2,0.4,0,100", r"line 8: expert is '-2'"),
        (8, "0,0,0,1,1,8,0.4,0,100", r"line 8: expert 8; .* stay below 8"),
        (8, "0,0,0,1,1,5,0.4,0,100", r"line 8: expert 5 of layer 1 stands a second time in step 0"),
        (8, "0,0,0,1,2,2,0.4,0,100", r"line 8: slot 2 follows 1 experts"),
        (8, "0,2,0,1,1,2,0.4,0,100", r"line 8: phase is 2"),
        (8, "0,0,0,1,1,2,0.4,3,100", r"line 8: residency is 3"),
        (8, "0,0,0,1,1,2,nan,0,100", r"line 8: weight is 'nan'"),
        (8, "0,0,0,1,1,2,,0,100", r"line 8: weight is ''"),
        (8, "0,0,0,4,0,2,0.4,0,100", r"line 8: layer 4 of a model with n_layer=4"),
        (8, "0,0,0,2,0,2,0.4,0,100", r"layers \[2\] are used, but no comment line"),
        (8, "0,0,99999999999999999999,1,1,2,0.4,0,100", r"line 8: step is"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: int, text: str, words: str) -> None:
    lines = (HEADER + COLUMNS + ROWS).splitlines()
    lines[line - 1] = text
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=words) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (HEADER.encode() + COLUMNS.encode(), "empty"),
        (b"blk.0 1.0\n", "no order in time"),
        (b"\xff\xfe\x00text", "neither NumPy's form nor text"),
        (b"PK\x03\x04 and no more", "not recorded routing in NumPy's form"),
        (b"\x93NUMPY\x01\x00", "not recorded routing in NumPy's form"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path / "none" / "a.npz", trace_from_ids(np.zeros((1, 1, 1), np.uint8)))


def test_ids(tmp_path: Path) -> None:
    ids = np.array([[[3, 1], [0, 2]], [[1, 2], [5, 0]], [[0, 1], [0, 1]]], np.uint8)
    np.savez(tmp_path / "a.npz", ids=ids, offsets=np.array([0, 2, 3]))
    np.save(tmp_path / "a.npy", ids)
    several, one = read_trace(tmp_path / "a.npz"), read_trace(tmp_path / "a.npy")
    for trace in (several, one):
        trace.check_valid()
        assert trace.experts.tolist() == ids.ravel().tolist()
        assert trace.layer.tolist() == [0, 1, 0, 1, 0, 1]
        assert set(trace.phase.tolist()) == {Phase.DECODE}
        assert trace.n_experts.tolist() == [6, 6]
    assert list(several.ranges()) == [(0, 4), (4, 6)]
    assert list(one.ranges()) == [(0, 6)]
    section = several.section(4, 6)
    section.check_valid()
    assert section.experts.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"ids": np.zeros((2, 2), np.uint8)}, r"uint8 of shape \[2, 2\]"),
        ({"ids": np.zeros((2, 2, 1))}, "float64"),
        ({"ids": np.array([[[0, -1]]])}, "experts -1 to 0"),
        ({"ids": np.array([[[0, 1 << 20]]])}, "experts 0 to 1048576"),
        ({"ids": np.array([[[0, 1]], [[2, 2]]])}, "step 1 names an expert twice in layer 0"),
        ({"ids": np.array([[[0, 1]]]), "offsets": np.array([0, 2])}, "`offsets` must rise from 0 to its 1"),
        ({"other": np.zeros(1)}, "it holds other"),
        ({"format": np.array("expertier-routing-9")}, "expertier-routing-9"),
        ({"format": np.array(FORMAT), "layer": np.zeros(1, np.int8)}, "`step_change`.* missing"),
    ],
)
def test_broken_archives(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=words):
        read_trace(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layer", [0, 9, 0], "`layer` leaves 0 to 1"),
        ("layer", [0, 1], "has 3 entries, `layer` has 2"),
        ("rows", [0, 1, 1], "`rows` leaves"),
        ("length", [2, 0, 2], "a `length` is below 1"),
        ("length", [2, 2, 2], "`length` must rise from 0 to its 4 experts"),
        ("phase", [0, 1, 2], "neither 0 nor 1"),
        ("experts", [0, 1, 8, 0], "an expert leaves its layer's"),
        ("experts", [1, 1, 2, 0], "call 0 names an expert twice"),
        ("sequences", [0, 4], "`sequences` must rise from 0 to its 3 calls"),
        ("n_experts", [8, 0], "`n_experts` leaves"),
        ("blocks", [4, 4], "`blocks` does not rise"),
        ("expert_bytes", [7, 0], "`expert_bytes` leaves"),
        ("expert_bytes", [7], "`expert_bytes` has 1 entries for 2 layers"),
        ("rows", [0.5, 1, 1], "not integers"),
    ],
)
def test_broken_recordings(tmp_path: Path, name: str, value: list[float], words: str) -> None:
    arrays = {
        "layer": [0, 1, 0],
        "step_change": [0, 0, 1],
        "phase": [0, 0, 1],
        "rows": [1, 1, 1],
        "length": [2, 1, 1],
        "experts": [0, 1, 2, 0],
        "sequences": [0, 3],
        "n_experts": [8, 8],
        "blocks": [1, 4],
        "expert_bytes": [7, 9],
    }
    path = tmp_path / "a.npz"
    np.savez(path, format=np.array(FORMAT), **{key: np.array(numbers) for key, numbers in arrays.items()})
    read_trace(path).check_valid()
    arrays[name] = value
    np.savez(path, format=np.array(FORMAT), **{key: np.array(numbers) for key, numbers in arrays.items()})
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


experts_of = st.lists(st.integers(0, 299), min_size=1, max_size=5, unique=True)
steps_of = st.lists(
    st.tuples(st.sampled_from(Phase), st.integers(1, 70_000), st.lists(experts_of, min_size=3, max_size=3)),
    max_size=12,
)


@given(steps_of)
def test_what_is_recorded_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Phase, int, list[list[int]]]]
) -> None:
    recorder = RoutingRecorder([300] * 3, [1, 2, 7], [10, 20, 1 << 40], rows_at_once=1 << 20)
    for phase, rows, layers in steps:
        recorder.add(enumerate(layers), phase, rows)
    trace = recorder.trace()
    trace.check_valid()
    assert trace.n_sequences == 1
    assert trace.experts.tolist() == [e for _, _, layers in steps for es in layers for e in es]
    assert trace.layer.tolist() == [0, 1, 2] * len(steps)
    assert trace.rows.tolist() == [rows for _, rows, _ in steps for _ in range(3)]
    path = tmp_path_factory.getbasetemp() / "recorded.npz"
    write_trace(path, trace)
    same(read_trace(path), trace)


def test_parts_of_a_call_are_one_call_and_a_long_batch_is_several_steps() -> None:
    recorder = RoutingRecorder([8, 8], [0, 1], [1, 1], rows_at_once=4)
    lookups = [(0, (0, 1)), (0, (2, 3)), (0, (4,)), (1, (5, 6)), (0, (0, 1)), (1, (5,)), (1, (5, 2)), (1, ())]
    recorder.add(lookups, Phase.PREFILL, 6)
    recorder.add([(0, (7,)), (1, (0,))], Phase.DECODE, 1)
    trace = recorder.trace()
    trace.check_valid()
    assert trace.lengths.tolist() == [5, 2, 2, 1, 2, 1, 1]
    assert trace.layer.tolist() == [0, 1, 0, 1, 1, 0, 1]
    assert trace.step.tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert trace.rows.tolist() == [4, 4, 2, 2, 1, 1, 1]
    assert trace.phase.tolist() == [0] * 5 + [1] * 2
    recorder.add([], Phase.DECODE, 1)
    same(recorder.trace(), trace)


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    trace = trace_from_ids(np.array([[[1, 0]]]))
    write_trace(path, trace)
    before = path.read_bytes()

    def fails(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ConfigError, match="No space left"):
        write_trace(path, trace)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.npz"]
