"""Which rooms of the proxy may include headers of which: the lower rooms none of the rooms that use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expertier.engine_adapter import ggml_proxy

UPPER_ROOMS = {"graph", "lookup", "prefetch"}
INCLUDED = re.compile(r'#include "(\w+)/')


@pytest.mark.parametrize("room", ["residency", "slab"])
def test_lower_rooms_include_no_upper_room(room: str) -> None:
    folder = Path(next(iter(ggml_proxy.__path__))) / room
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".h")]
    assert files
    upward = {path.name: found for path in files if (found := rooms_of(path) & UPPER_ROOMS)}
    assert upward == {}


def test_includes_are_seen() -> None:
    folder = Path(next(iter(ggml_proxy.__path__)))
    assert rooms_of(folder / "lookup" / "open_lookup.cpp") == {"lookup", "prefetch"}


def rooms_of(path: Path) -> set[str]:
    return set(INCLUDED.findall(path.read_text()))
