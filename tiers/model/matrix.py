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
    """A 3-d tensor with one matrix an expert: `ne1` rows of `ne0` elements of `ggml_type`, experts one after
    another.

    `file_offset` is where expert 0 begins in the file, `expert_bytes` the bytes of one expert, `type_bytes`
    those of one quantisation block.
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
