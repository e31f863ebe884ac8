"""A routing profile: how a model's routing spreads over its layers and experts, without an order in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError
from expertier.planner.profiles.of_trace import count_uses, reuse_distances
from expertier.planner.profiles.text_form import weights_of
from expertier.planner.traces.trace import Phase, Trace

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertUses:
    """What a recording says of each expert. L is the number of layers, E the largest number of experts in a layer."""

    blocks: I32
    """[L] each layer's number in the model."""
    n_experts: I32
    """[L] how many experts each layer has."""
    uses: I64
    """[L, E] how many calls used each expert."""
    reuse_distances: I64
    """[L, E + 1] how many other experts were used between two uses of one (`profiles/of_trace.py`)."""
    calls: int
    """Layer calls that were counted."""

    @property
    def n_layers(self) -> int:
        """Return how many layers have experts."""
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class RoutingProfile:
    """Either the uses of each expert, or only a weight for each layer, by the layer's number in the model.

    `name` says in messages where the profile came from.
    """

    name: str
    experts: ExpertUses | None = None
    layer_weights: dict[int, float] | None = None

    def __post_init__(self) -> None:
        """Assert that exactly one of the two is there."""
        assert (self.experts is None) != (self.layer_weights is None), "a profile is of experts or of layers"

    def warm_uses(self, blocks: Sequence[int], n_experts: Sequence[int]) -> F64 | None:
        """Return the uses of a model's experts, [layers, most experts]; None where it has weights of layers only.

        Raises ConfigError for a profile of another model.
        """
        if self.experts is None:
            return None
        known = self.experts
        positions = list(range(known.n_layers))
        same_blocks = known.blocks.tolist() == list(blocks)
        # A recording of ids alone numbers its layers from 0, whatever their numbers in the model are.
        only_positions = known.blocks.tolist() == positions and len(blocks) == known.n_layers
        if not (same_blocks or only_positions) or known.n_experts.tolist() != list(n_experts):
            found = _described(known.blocks.tolist(), known.n_experts.tolist())
            raise ConfigError(
                f"{self.name}: a profile of {found}; the model has {_described(list(blocks), list(n_experts))}: make "
                "it from a recording of this model"
            )
        return known.uses.astype(np.float64)

    def plan_uses(self, blocks: Sequence[int], n_experts: Sequence[int]) -> F64:
        """Return what `plan_layers` takes as its profile, [layers, most experts].

        Where the profile has weights of layers, the n-th expert of a layer counts 1/n of the layer's weight, so that
        the numbers of slots are in proportion to the weights. Raises ConfigError for a profile of another model.
        """
        uses = self.warm_uses(blocks, n_experts)
        if uses is not None:
            return uses
        assert self.layer_weights is not None
        try:
            weights = np.array(weights_of(self.layer_weights, blocks))
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        place = np.arange(max(n_experts))
        falling = weights[:, np.newaxis] / (place + 1)
        spread: F64 = np.where(place < np.array(n_experts)[:, np.newaxis], falling, 0.0)
        return spread


def profile_of(trace: Trace, name: str, phase: Phase | None = None) -> RoutingProfile:
    """Return the profile of a recording's calls of one phase, or of all calls where `phase` is None.

    Raises ConfigError where there are no such calls.
    """
    counted = trace if phase is None else trace.of_phase(phase)
    if counted.n_calls == 0:
        raise ConfigError(
            f"{name}: it has no calls of {'any phase' if phase is None else phase.name.lower()}; record some, or "
            "choose another phase"
        )
    return RoutingProfile(
        name,
        ExpertUses(
            blocks=counted.blocks,
            n_experts=counted.n_experts,
            uses=count_uses(counted),
            reuse_distances=reuse_distances(counted),
            calls=counted.n_calls,
        ),
    )


def default_phase(trace: Trace) -> Phase | None:
    """Return the phase to count by default: decode, which slots serve, or None (all calls) where there is no decode."""
    return Phase.DECODE if (trace.phase == Phase.DECODE).any() else None


def _described(blocks: list[int], n_experts: list[int]) -> str:
    low, high = min(n_experts), max(n_experts)
    experts = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(blocks)} layers (blk.{blocks[0]} to blk.{blocks[-1]}) of {experts} experts"
