"""The shape of a random MoE model, as `synth.write_model` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from expertier.engine_adapter.models.synth_blocks import WEIGHT_TYPES, WeightType, block_elements, row_bytes
from expertier.errors import ConfigError

N_SPECIAL_TOKENS = 3 + 256
"""Unknown, beginning and end of text, and one token a byte: the start of every vocabulary."""

ExpertLayout = Literal["split", "fused", "no gate"]
"""An expert's matrices: gate, up and down; gate and up in one, and down; up and down."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a random model looks like: its architecture, counts, widths, weight types and the seed.

    `layers` counts the layers with experts; an architecture may have other layers too. `n_embd` is the model's width,
    `n_ff` an expert's. With `layer_types`, pairs of a gate and up type and a down type, the layers take these in
    turn instead of `gate_up_type` and `down_type`; with `layer_top_k` and `layer_n_ff` they take in turn how many
    experts a token uses, at most `top_k`, and how wide these are, instead of `top_k` and `n_ff`. `router_skew` is
    the standard deviation of the logarithm of the router rows' scales: 0 makes all experts about equally likely,
    0.4 gives popular experts as real models have.
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
    architecture: str = "qwen3moe"
    expert_layout: ExpertLayout = "split"
    layer_types: tuple[tuple[WeightType, WeightType], ...] = ()
    layer_top_k: tuple[int, ...] = ()
    layer_n_ff: tuple[int, ...] = ()

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
        layouts = get_args(ExpertLayout)
        self._require(self.expert_layout in layouts, "expert_layout", "one of " + ", ".join(layouts))
        self._require_type("gate_up_type", self.gate_up_type, "n_embd")
        self._require_type("down_type", self.down_type, "n_ff")
        self._require_type("dense_type", self.dense_type, "n_embd", "attention_width")
        for gate_up, down in self.layer_types:
            self._require_type("layer_types", gate_up, "n_embd")
            self._require_type("layer_types", down, "n_ff")
        fits = not self.layer_top_k or (min(self.layer_top_k) >= 1 and max(self.layer_top_k) == self.top_k)
        self._require(fits, "layer_top_k", f"numbers from 1 on, the most of them top_k = {self.top_k}")
        for layer in range(self.layers if self.layer_n_ff else 0):
            width, block = self.n_ff_of(layer), block_elements(self.expert_types(layer)[1])
            self._require(
                width >= 1 and width % block == 0, "layer_n_ff", f"multiples of {block}, down's block"
            )

    @property
    def attention_width(self) -> int:
        """Width of all heads side by side."""
        return self.heads * self.head_dim

    def expert_types(self, layer: int) -> tuple[WeightType, WeightType]:
        """Return the types of a layer's gate and up matrices, and of its down matrices."""
        if self.layer_types:
            return self.layer_types[layer % len(self.layer_types)]
        return self.gate_up_type, self.down_type

    def top_k_of(self, layer: int) -> int:
        """Return how many experts of a layer a token uses."""
        return self.layer_top_k[layer % len(self.layer_top_k)] if self.layer_top_k else self.top_k

    def n_ff_of(self, layer: int) -> int:
        """Return the width of a layer's experts."""
        return self.layer_n_ff[layer % len(self.layer_n_ff)] if self.layer_n_ff else self.n_ff

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of the first layer: all its matrices."""
        return self._expert_bytes(0)

    @property
    def expert_bytes_total(self) -> int:
        """Bytes of all experts of all layers."""
        return self.experts * sum(self._expert_bytes(layer) for layer in range(self.layers))

    def _expert_bytes(self, layer: int) -> int:
        gate_up, down = self.expert_types(layer)
        width = self.n_ff_of(layer)
        rows = width if self.expert_layout == "no gate" else 2 * width
        return rows * row_bytes(gate_up, self.n_embd) + self.n_embd * row_bytes(down, width)

    def _require(self, holds: bool, field: str, limit: str) -> None:
        if not holds:
            found = getattr(self, field)
            raise ConfigError(f"no engine can run this model shape: {field} is {found}; it must be {limit}")

    def _require_type(self, field: str, kind: WeightType, *widths: str) -> None:
        """Check a weight type's name, and that every row that it is used for holds whole blocks."""
        self._require(kind in WEIGHT_TYPES, field, "one of " + ", ".join(WEIGHT_TYPES))
        block = block_elements(kind)
        for width in widths:
            self._require(
                getattr(self, width) % block == 0, width, f"a multiple of {block}, the block of {kind}"
            )
