"""What is measured: one row for each way of placing the experts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from gpu.models import BenchModel

_NAME = re.compile(r"(cache|ours)-(\d+)(?:-l2-(\d+))?")
_ON_ONE = "@1"

GPU_ROWS = (
    "vram",
    "ncmoe",
    *(f"{side}-{percent}" for percent in (100, 75, 50, 25) for side in ("cache", "ours")),
    "ours-50-l2-25",
)
SPLIT_ROWS = (
    "vram",
    "ncmoe",
    *(f"{side}-{percent}" for percent in (100, 75, 50, 25) for side in ("cache", "ours")),
    *(f"{row}{_ON_ONE}" for row in ("vram", "ours-100", "ours-50", "ours-25")),
)
"""On several devices, and some on the first of them alone."""

TENSOR_ROWS = tuple(row for row in SPLIT_ROWS if not row.startswith("cache"))
"""llama.cpp's own cache refuses to split tensors: there its `-ncmoe` is what one would use instead."""

CPU_ROWS = tuple(row for row in GPU_ROWS if not row.startswith("cache"))
"""llama.cpp's own cache needs a GPU."""


@dataclass(frozen=True)
class Row:
    """A row: which side it is, and its budgets as percentages of all expert bytes."""

    name: str
    side: str
    """vram: all on the device. ncmoe: experts computed on the CPU. cache: llama.cpp's own. ours: the tiers."""
    percent: int = 100
    host_percent: int = 100
    is_on_one: bool = False
    """Whether it runs on the first of several devices."""

    @classmethod
    def parse(cls, name: str) -> Row:
        """Read `vram`, `ncmoe`, `cache-P`, `ours-P` or `ours-P-l2-P`, each with `@1` or without. Raises SystemExit."""
        row, on_one = name.removesuffix(_ON_ONE), name.endswith(_ON_ONE)
        if row in ("vram", "ncmoe"):
            return cls(name, row, is_on_one=on_one)
        found = _NAME.fullmatch(row)
        if found is None or (found[3] and found[1] == "cache") or not 0 < int(found[2]) <= 100:
            raise SystemExit(
                f"no row {name!r}: give vram, ncmoe, cache-P, ours-P or ours-P-l2-P, P in percent"
            )
        return cls(name, found[1], int(found[2]), int(found[3]) if found[3] else 100, on_one)

    def cache_bytes(self, model: BenchModel, table: ExpertTable) -> int:
        """Return the device memory for experts, the same for both caches; whole MiB.

        At 100 % it is what both need to hold all experts: ours rounds slots up, llama.cpp's has one more slot.
        """
        if self.percent < 100:
            return model.expert_bytes * self.percent // 100 // MIB * MIB
        ours = sum(demand.bytes_for(demand.n_experts) for demand in table.layer_demands())
        theirs = model.expert_bytes + 2 * model.largest_expert_bytes
        return -(-max(ours, theirs) // MIB) * MIB

    def host_bytes(self, model: BenchModel, table: ExpertTable) -> int:
        """Return the budget of L2, whole MiB; at 100 % it holds all experts."""
        if self.host_percent == 100:
            return -(-all_copies_bytes(table) // MIB) * MIB
        return model.expert_bytes * self.host_percent // 100 // MIB * MIB
