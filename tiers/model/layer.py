"""The experts of one layer, as the GGUF stores them."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.tiers.model.matrix import ExpertMatrix
from expertier.tiers.model.span import Span


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One MoE layer: `block` is the N of the tensors' `blk.N.`, `matrices` what every expert has of them.

    A token uses `top_k` of its experts.
    """

    block: int
    n_experts: int
    matrices: tuple[ExpertMatrix, ...]
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, all its matrices together."""
        return sum(matrix.expert_bytes for matrix in self.matrices)

    def spans(self, expert: int) -> list[Span]:
        """Return where the expert's bytes lie in the model, one span a matrix."""
        return [matrix.span(expert) for matrix in self.matrices]
