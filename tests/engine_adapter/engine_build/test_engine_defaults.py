from __future__ import annotations

import pytest

from expertier.engine_adapter.build.defaults import Value, differences


def test_equal_defaults_have_no_differences() -> None:
    defaults = {"model": {"devices": None, "use_mmap": True}, "context": {"n_ctx": 512, "kv": "set"}}
    assert differences(defaults, defaults) == []


@pytest.mark.parametrize(("recorded", "found"), [(0.1, 0.1 + 1e-9), (1, 1.0), (True, 1), (None, None)])
def test_the_same_value_in_another_notation_is_no_difference(recorded: Value, found: Value) -> None:
    assert differences({"model": {"field": recorded}}, {"model": {"field": found}}) == []


@pytest.mark.parametrize(
    ("recorded", "found"), [(1, 2), (None, "set"), (0, None), (0.1, 0.1001), (0.0, 1e-30)]
)
def test_another_value_is_named_with_both(recorded: Value, found: Value) -> None:
    (line,) = differences({"model": {"field": recorded}}, {"model": {"field": found}})
    assert "model.field" in line
    assert repr(recorded) in line
    assert repr(found) in line


def test_fields_and_structures_that_came_or_went_are_named() -> None:
    recorded = {"model": {"kept": 1, "gone": 2}, "old": {"field": 3}}
    found = {"model": {"kept": 1, "new": 4}}
    assert differences(recorded, found) == [
        "model.gone: recorded 2, missing now",
        "model.new: not recorded, now 4",
        "old.field: recorded 3, missing now",
    ]
