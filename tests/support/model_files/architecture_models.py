"""The random models of the architecture tests: one a layout of experts, of each architecture that can be made."""

from __future__ import annotations

from dataclasses import replace

from engine_runs.tiered_runs import SMALL
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_blocks import WEIGHT_TYPES

_BASE = replace(SMALL, layers=2, seed=14)

_MIXED = (("Q4_K", "Q6_K"), ("IQ3_XXS", "IQ4_NL"), ("Q8_0", "Q4_0"), ("MXFP4", "F16"))

MODELS: dict[str, ModelShape] = {
    "qwen3moe": _BASE,
    "llama": replace(_BASE, architecture="llama", experts=8, top_k=2),
    "llama, no gate": replace(_BASE, architecture="llama", expert_layout="no gate"),
    "gpt-oss": replace(_BASE, architecture="gpt-oss", gate_up_type="MXFP4", down_type="MXFP4"),
    "deepseek2": replace(_BASE, architecture="deepseek2"),
    "deepseek2, fused": replace(_BASE, architecture="deepseek2", expert_layout="fused"),
    "olmoe": replace(_BASE, architecture="olmoe", kv_heads=SMALL.heads),
    "glm4moe": replace(_BASE, architecture="glm4moe"),
    "gemma4": replace(_BASE, architecture="gemma4", expert_layout="fused"),
    "gemma4, split": replace(_BASE, architecture="gemma4"),
    "llama4": replace(_BASE, architecture="llama4"),
    "nemotron_h_moe": replace(_BASE, architecture="nemotron_h_moe", expert_layout="no gate"),
    "nemotron_h_moe, puzzle": replace(
        _BASE,
        architecture="nemotron_h_moe",
        expert_layout="no gate",
        layers=3,
        layer_top_k=(2, 4, 1),
        layer_n_ff=(512, 256, 768),
    ),
    "qwen4exp": replace(_BASE, architecture="qwen4exp"),
    "qwen4exp, fused": replace(_BASE, architecture="qwen4exp", expert_layout="fused"),
    "qwen3moe, mixed": replace(_BASE, layers=4, layer_types=_MIXED),
    "deepseek2, mixed": replace(
        _BASE, architecture="deepseek2", layers=4, expert_layout="fused", layer_types=_MIXED
    ),
}
"""By architecture, and what is special about its experts."""

TYPES: dict[str, ModelShape] = {
    kind: replace(_BASE, gate_up_type=kind, down_type=kind) for kind in WEIGHT_TYPES
}
"""qwen3moe models by the type of all their expert matrices."""

UNUSED_LAYERS = {"glm4moe": 1}
"""How many of the last MoE layers the engine does not load: blocks for drafting."""


def slot_counts(shape: ModelShape) -> dict[str, int]:
    """The numbers of slots to try, by name; without those that equal an earlier one."""
    counts = {
        "one": 1,
        "below top-k": shape.top_k - 1,
        "top-k": shape.top_k,
        "half": shape.experts // 2,
        "all": shape.experts,
    }
    names = list(counts)
    return {
        name: counts[name]
        for i, name in enumerate(names)
        if counts[name] not in [counts[n] for n in names[:i]]
    }
