"""The page of the field's failures: it has every row once, and names all tests of a row and no other."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "field-failures.md"
N_ROWS = 34


def test_the_page_lists_every_row_and_every_test():
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| (\d+) \|", line):
            assert int(found[1]) not in rows, f"row {found[1]} is there twice"
            rows[int(found[1])] = line
    assert sorted(rows) == list(range(1, N_ROWS + 1))
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    tests = re.findall(r"^def (test_row_(\d+)_\w+)\(", sources, re.MULTILINE)
    assert len(tests) == len(set(tests)) > 0
    for number, line in rows.items():
        named = set(re.findall(r"\btest_row_\w+", line))
        assert named == {name for name, row in tests if int(row) == number}, line
