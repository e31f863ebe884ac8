"""The shape of a random MoE model, as `synth.write_model` writes it."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.engine_adapter.synth_blocks import WEIGHT_TYPES, WeightType, block_elements, row_bytes
from expertier.errors import ConfigError

N_SPECIAL_TOKENS = 3 + 256
"""Unknown, beginning and end of text, and one token a byte: the start of every vocabulary."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a random `qwen3moe` model looks like: counts, widths, weight types and the seed.

    `n_embd` is the model's width, `n_ff` an expert's. `router_skew` is the standard deviation of the
    logarithm of the router rows' scales: 0 makes all experts about equally likely, 0.4 gives popular experts
    as real models have.
    Errors: ConfigError, when an engine could not run such a model.
    """

    layers: int
    experts: int
    top_k: int
    n_embd: int
    n_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seed: int
    gate_up_type: WeightType
    down_type: WeightType
    dense_type: WeightType = "F32"
    router_skew: float = 0.4
    context_length: int = 4096

    def __post_init__(self) -> None:
        """Refuse shapes that no engine can run."""
        for name in ("layers", "experts", "top_k", "n_embd", "n_ff", "heads", "kv_heads", "context_length"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.top_k <= self.experts, "top_k", f"at most experts = {self.experts}")
        self._require(self.heads % self.kv_heads == 0, "heads", f"a multiple of kv_heads = {self.kv_heads}")
        self._require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", "an even number above 0")
        self._require(
            self.vocab > N_SPECIAL_TOKENS, "vocab", f"above {N_SPECIAL_TOKENS}, the number of special tokens"
        )
        self._require(self.seed >= 0, "seed", "0 or more")
        self._require(0 <= self.router_skew <= 2, "router_skew", "between 0 and 2")
        self._require_type("gate_up_type", "n_embd")
        self._require_type("down_type", "n_ff")
        self._require_type("dense_type", "n_embd", "attention_width")

    @property
    def attention_width(self) -> int:
        """Width of all heads side by side."""
        return self.heads * self.head_dim

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: its gate, up and down matrices."""
        gate_and_up = 2 * self.n_ff * row_bytes(self.gate_up_type, self.n_embd)
        return gate_and_up + self.n_embd * row_bytes(self.down_type, self.n_ff)

    @property
    def expert_bytes_total(self) -> int:
        """Bytes of all experts of all layers."""
        return self.layers * self.experts * self.expert_bytes

    def _require(self, holds: bool, field: str, limit: str) -> None:
        if not holds:
            found = getattr(self, field)
            raise ConfigError(f"no engine can run this model shape: {field} is {found}; it must be {limit}")

    def _require_type(self, field: str, *widths: str) -> None:
        """Check a weight type's name, and that every row that it is used for holds whole blocks."""
        kind = getattr(self, field)
        self._require(kind in WEIGHT_TYPES, field, "one of " + ", ".join(WEIGHT_TYPES))
        block = block_elements(kind)
        for width in widths:
            self._require(
                getattr(self, width) % block == 0, width, f"a multiple of {block}, the block of {kind}"
            )
