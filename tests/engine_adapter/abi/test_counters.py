"""The proxy's counters: Python has C++'s list, and the documents' table is made from it.

That a library counts as many things is asked whenever counters are read; the metrics are compared in
`tests/serve/test_metrics.py`.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path

import pytest

from expertier.engine_adapter.abi.counters import ProxyCounters, counter_list
from expertier.errors import EngineMismatchError

REPOSITORY = Path(__file__).parents[3]
HEADER = REPOSITORY / "engine_adapter" / "ggml_proxy" / "abi" / "counters.h"
NAMES = [counter.name for counter in counter_list()]


class Proxy:
    """A library that counts `n` things: the i-th of them 1000 + i times."""

    def __init__(self, n: int) -> None:
        self.n = n

    def expertier_tiers_counters(self, _tiers, out, n):
        for i in range(min(n, self.n)):
            out[i] = 1000 + i
        return self.n


def test_every_line_of_the_header_is_read():
    assert re.findall(r"X\((\w+), ", HEADER.read_text()) == NAMES
    assert len(NAMES) == len(set(NAMES)) > 30
    assert all(re.fullmatch(r"[a-z][^.]*", counter.meaning) for counter in counter_list())
    assert [counter.name for counter in counter_list() if not counter.grows] == ["prefetch_layers"]


def test_values_by_name():
    counters = ProxyCounters.read(Proxy(len(NAMES)), 1)
    assert counters.as_dict() == {name: 1000 + i for i, name in enumerate(NAMES)}
    assert counters.graphs == 1000
    assert copy.deepcopy(counters) == counters != ProxyCounters([0] * len(NAMES))
    assert ProxyCounters.total([counters, counters]).segments == 2 * counters.segments
    with pytest.raises(AttributeError, match="no counter 'slices'; it has graphs, segments"):
        counters.slices  # noqa: B018


@pytest.mark.parametrize("n", [0, len(NAMES) - 1, len(NAMES) + 1])
def test_a_library_with_another_list_is_refused(n):
    with pytest.raises(EngineMismatchError, match=f"counts {n} things .* knows {len(NAMES)}: .*--rebuild"):
        ProxyCounters.read(Proxy(n), 1)


def test_the_documents_table_is_the_lists():
    script = REPOSITORY / "docs" / "list_counters.py"
    specification = importlib.util.spec_from_file_location("list_counters", script)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run `python docs/list_counters.py`"
