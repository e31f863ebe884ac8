"""A user's routing profile, as the plan and the warm start of one model use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from expertier.planner.profiles.file import read_profile
from expertier.tiers.model.table import ExpertTable

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """How often each expert of a model was used, as arrays [layer, expert]; both None without a profile."""

    plan_uses: F64 | None = None
    """For `plan_layers`."""
    warm_uses: F64 | None = None
    """For `TierManager.warm_start`; None where the profile has numbers of layers only, not of experts."""

    @classmethod
    def of(cls, path: Path | None, table: ExpertTable) -> Self:
        """Read the profile at `path` for the model of `table`; without a path, return an empty one.

        Raises `ConfigError` where the profile cannot be read, or is of another model.
        """
        if path is None:
            return cls()
        profile = read_profile(path)
        blocks = [layer.block for layer in table.layers]
        n_experts = [layer.n_experts for layer in table.layers]
        return cls(profile.plan_uses(blocks, n_experts), profile.warm_uses(blocks, n_experts))

    def of_layers(self, layers: Sequence[int], most_experts: int) -> Self:
        """Return the rows of `layers`, cut to `most_experts` columns; none of these layers has more experts."""

        def rows(uses: F64 | None) -> F64 | None:
            return None if uses is None else uses[list(layers), :most_experts]

        return type(self)(rows(self.plan_uses), rows(self.warm_uses))
