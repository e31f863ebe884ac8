"""Which tensors the engine is told to place in the tiers' buffer."""

from __future__ import annotations

import re

from expertier.tiers.table import ExpertTable


def experts_regex(table: ExpertTable) -> str:
    """Return the override pattern that matches exactly the table's expert tensors, by their names' forms."""
    forms = sorted(
        {
            re.sub(r"^blk\\\.\d+\\\.", r"blk\\.[0-9]+\\.", re.escape(matrix.name))
            for layer in table.layers
            for matrix in layer.matrices
        }
    )
    return "^(" + "|".join(forms) + ")$"
