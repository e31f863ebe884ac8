"""Patterns that tell the engine which tensors to place in the tiers' buffer."""

from __future__ import annotations

import re
from collections import defaultdict

from expertier.tiers.model.table import ExpertTable


def experts_regex(table: ExpertTable) -> str:
    """Return the override pattern that matches the table's expert tensors in every block."""
    forms = sorted(
        {
            re.sub(r"^blk\\\.\d+\\\.", r"blk\\.[0-9]+\\.", re.escape(matrix.name))
            for layer in table.layers
            for matrix in layer.matrices
        }
    )
    return "^(" + "|".join(forms) + ")$"


def blocks_regex(table: ExpertTable) -> str:
    """Return the override pattern that matches the table's expert tensors in the table's own blocks only."""
    blocks = defaultdict(list)
    for layer in table.layers:
        for matrix in layer.matrices:
            form = re.sub(r"^blk\\\.\d+\\\.", "", re.escape(matrix.name))
            blocks[form].append(str(layer.block))
    forms = defaultdict(list)
    for form, numbers in blocks.items():
        forms["|".join(numbers)].append(form)
    each = [rf"blk\.({numbers})\.({'|'.join(sorted(names))})" for numbers, names in sorted(forms.items())]
    return "^(" + "|".join(each) + ")$"


def placed_regex(table: ExpertTable, *, is_split: bool) -> str:
    """Return the pattern of a device's expert tensors; `is_split` says whether other devices have other blocks."""
    return blocks_regex(table) if is_split else experts_regex(table)
