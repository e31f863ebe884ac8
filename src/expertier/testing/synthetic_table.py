"""Tables of experts that exist in no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.matrix import ExpertMatrix, Role
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.table import ExpertTable

_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer's experts: gate and up of `n_ff` rows of `n_embd`, down of `n_embd` rows of `n_ff`.

    `types` are the GGUF names of the quantisations of gate, up and down.
    """

    n_experts: int = 8
    n_embd: int = 64
    n_ff: int = 32
    types: tuple[str, str, str] = ("Q4_0", "Q4_0", "Q4_0")


def synthetic_table(layers: Sequence[LayerShape], *, top_k: int = 2) -> ExpertTable:
    """Return the table of a model whose expert tensors lie one after another, as a GGUF's would.

    Its file does not exist: give the manager a source, such as `PatternSource`.
    """
    offset = 0
    made = []
    for block, shape in enumerate(layers):
        matrices = []
        for role, kind in zip((Role.GATE, Role.UP, Role.DOWN), shape.types, strict=True):
            ne0, ne1 = (shape.n_ff, shape.n_embd) if role is Role.DOWN else (shape.n_embd, shape.n_ff)
            number = gguf.GGMLQuantizationType[kind]
            elements, type_bytes = gguf.GGML_QUANT_SIZES[number]
            expert_bytes = ne0 // elements * type_bytes * ne1
            name = f"blk.{block}.ffn_{role}_exps.weight"
            matrices.append(ExpertMatrix(role, name, int(number), type_bytes, ne0, ne1, expert_bytes, offset))
            offset += -(-shape.n_experts * expert_bytes // _ALIGNMENT) * _ALIGNMENT
        made.append(ExpertLayer(block, shape.n_experts, tuple(matrices), min(top_k, shape.n_experts)))
    file = ModelFile(Path("synthetic.gguf"), 0, FileIdentity(offset, 0, 0, 0, 0))
    return ExpertTable((file,), "synthetic", tuple(made))
