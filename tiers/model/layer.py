"""The experts of one layer, as the GGUF stores them."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.tiers.model.matrix import ExpertMatrix
from expertier.tiers.model.span import Span


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One MoE layer of `n_experts`, of which a token uses `top_k`.

    `block` is the N of its tensors' names `blk.N.`. `matrices` are the matrices that every expert has, in the order in
    which a slot holds them.
    """

    block: int
    n_experts: int
    matrices: tuple[ExpertMatrix, ...]
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert: of all its matrices together."""
        return sum(matrix.expert_bytes for matrix in self.matrices)

    def spans(self, expert: int) -> list[Span]:
        """Return where the expert's bytes lie in the model, one span a matrix."""
        return [matrix.span(expert) for matrix in self.matrices]
