"""An architecture, as far as the generator of models must know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gguf import GGUFWriter

from expertier.engine_adapter.models.model_shape import ExpertLayout, ModelShape
from expertier.engine_adapter.models.synth_arch.tensor import Tensor
from expertier.errors import ConfigError

Rule = Callable[[ModelShape], str | None]
"""Returns what is wrong with a shape for this architecture; None where nothing is."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its `name` in a file, its tensors in the file's order, and the keys beside the common ones.

    `layouts` are the expert layouts that the engine loads for it. `varies` says that a token may use more experts in
    one layer than in another, and experts of other widths. `replays` says that each MoE layer of a shape has a router
    which reads the one residual stream, so that a `trace_model` can decide which experts it picks.
    """

    name: str
    tensors: Callable[[ModelShape], Iterator[Tensor]]
    add_keys: Callable[[GGUFWriter, ModelShape], None]
    layouts: frozenset[ExpertLayout] = frozenset({"split"})
    rule: Rule | None = None
    replays: bool = True
    varies: bool = False

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError for a shape that an engine could not run as this architecture."""
        wrong = self.rule(shape) if self.rule is not None else None
        if shape.expert_layout not in self.layouts:
            wrong = f"expert_layout is {shape.expert_layout!r}; it must be one of {sorted(self.layouts)}"
        if (shape.layer_top_k or shape.layer_n_ff) and not self.varies:
            wrong = "all of its layers must use the same number of experts for a token, of the same width"
        if wrong is not None:
            raise ConfigError(f"no engine can run this model shape as {self.name}: {wrong}")
