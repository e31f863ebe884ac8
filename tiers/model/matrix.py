"""One expert matrix of one layer, as the GGUF stores it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from expertier.tiers.model.span import Span


class Role(StrEnum):
    """What an expert matrix does in the feed-forward network."""

    GATE = "gate"
    UP = "up"
    DOWN = "down"
    GATE_UP = "gate_up"


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A 3-d tensor that holds one matrix for each expert of a layer, one expert after another.

    Each matrix has `ne1` rows of `ne0` elements of the type `ggml_type`. Expert 0 begins at `file_offset` of the model,
    each expert takes `expert_bytes`, and each quantisation block takes `type_bytes`.
    """

    role: Role
    name: str
    ggml_type: int
    type_bytes: int
    ne0: int
    ne1: int
    expert_bytes: int
    file_offset: int

    def span(self, expert: int) -> Span:
        """Return where the expert's bytes lie in the model."""
        return Span(self.file_offset + expert * self.expert_bytes, self.expert_bytes)
