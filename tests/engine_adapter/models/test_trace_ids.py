"""Reading recorded routing: both forms, choices of sequence and steps, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertier.engine_adapter.models.trace_ids import read_trace_ids
from expertier.errors import ConfigError

IDS = np.array(
    [[[s % 5, 5 + s % 3] for _ in range(3)] for s in range(10)], np.uint8
)  # [10 steps, 3 layers, 2]
OFFSETS = np.array([0, 4, 4, 10])


def saved(folder: Path, **arrays: Any) -> Path:
    path = folder / "routing.npz"
    np.savez(path, **arrays)
    return path


def test_all_steps_of_both_forms(tmp_path: Path) -> None:
    npz = read_trace_ids(saved(tmp_path, ids=IDS, offsets=OFFSETS))
    np.save(tmp_path / "ids.npy", IDS.astype(np.int64))
    npy = read_trace_ids(tmp_path / "ids.npy")
    for ids in (npz, npy, read_trace_ids(saved(tmp_path, ids=IDS))):
        assert ids.dtype == np.int32
        assert ids.flags.c_contiguous
        np.testing.assert_array_equal(ids, IDS)


def test_a_sequence_and_its_first_steps(tmp_path: Path) -> None:
    path = saved(tmp_path, ids=IDS, offsets=OFFSETS)
    np.testing.assert_array_equal(read_trace_ids(path, sequence=2), IDS[4:])
    np.testing.assert_array_equal(read_trace_ids(path, sequence=2, steps=2), IDS[4:6])
    np.testing.assert_array_equal(read_trace_ids(path, sequence=0, steps=99), IDS[:4])
    np.testing.assert_array_equal(read_trace_ids(path, steps=7), IDS[:7])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"experts": IDS}, "holds experts, but no `ids`"),
        ({"ids": IDS[0]}, r"shape \[3, 2\]; .* \[steps, layers, top-k\]"),
        ({"ids": IDS[:0]}, "none of them 0"),
        ({"ids": IDS.astype(np.float32)}, "`ids` is float32"),
        ({"ids": IDS.astype(np.int8) - 1}, "experts -1 to 6 are named"),
        ({"ids": IDS.astype(np.int64) << 30}, "stay below"),
        ({"ids": np.zeros((4, 3, 2), int)}, "step 0 names expert 0 twice in layer 0"),
        ({"ids": IDS, "offsets": np.array([0, 9])}, "must rise from 0 to its 10 steps; it goes from 0 to 9"),
        ({"ids": IDS, "offsets": np.array([0, 8, 4, 10])}, "must rise"),
        ({"ids": IDS, "offsets": np.array([[0, 10]])}, r"`offsets` is int64 of shape \[1, 2\]"),
    ],
)
def test_a_file_that_is_no_recording(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = saved(tmp_path, **arrays)
    with pytest.raises(ConfigError, match=message) as raised:
        read_trace_ids(path)
    assert str(path) in str(raised.value)


def test_a_repeated_expert_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    ids = IDS.copy()
    ids[6, 1] = [3, 3]
    path = saved(tmp_path, ids=ids, offsets=OFFSETS)
    with pytest.raises(ConfigError, match="step 6 names expert 3 twice in layer 1"):
        read_trace_ids(path, sequence=2)
    read_trace_ids(path, sequence=2, steps=2)  # steps that are not taken may be wrong


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"sequence": 3}, "sequence 3 .* has 3, counted from 0"),
        ({"sequence": 1}, "sequence 1 .* has no steps"),
        ({"steps": 0}, "0 steps .* ask for 1 or more"),
    ],
)
def test_a_choice_that_the_file_cannot_meet(tmp_path: Path, choice: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace_ids(saved(tmp_path, ids=IDS, offsets=OFFSETS), **choice)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("text.npz", b"some text"), ("cut.npz", b"PK\x03\x04 cut"), ("empty.npy", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}: not recorded routing"):
            read_trace_ids(tmp_path / name)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace_ids(tmp_path / "nowhere.npz")
