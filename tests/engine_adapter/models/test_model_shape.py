from __future__ import annotations

import dataclasses

import pytest

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import DEMO_SHAPE, TINY_SHAPE
from expertier.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"top_k": 17}, "top_k is 17; it must be at most experts = 16"),
        ({"kv_heads": 3}, "heads is 4; it must be a multiple of kv_heads = 3"),
        ({"head_dim": 63}, "head_dim is 63; it must be an even number"),
        ({"vocab": 259}, "vocab is 259; it must be above 259"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        ({"router_skew": 2.5}, "router_skew is 2.5; it must be between 0 and 2"),
        ({"down_type": "Q3_K"}, "down_type is Q3_K; it must be one of F32, F16, Q8_0, Q4_0, Q4_K, Q6_K"),
        ({"n_embd": 320}, "n_embd is 320; it must be a multiple of 256, the block of Q4_K"),
        ({"n_ff": 128}, "n_ff is 128; it must be a multiple of 256, the block of Q6_K"),
        ({"expert_layout": "shuffled"}, "expert_layout is shuffled; it must be one of split, fused, no gate"),
        ({"layer_types": (("Q4_0", "Q5_1"),)}, r"layer_types is .*; it must be one of F32, F16"),
        ({"layer_types": (("F32", "F32"), ("Q4_0", "MXFP4")), "n_ff": 272}, "n_ff is 272; .* multiple of"),
        (
            {"dense_type": "Q8_0", "head_dim": 62},
            "attention_width is 248; it must be a multiple of 32, the block of Q8_0",
        ),
    ],
)
def test_a_shape_that_cannot_run_says_why(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY_SHAPE, **changes)


def test_expert_bytes_add_up() -> None:
    shape = dataclasses.replace(TINY_SHAPE, gate_up_type="F32", down_type="F16")
    assert shape.expert_bytes == 256 * 256 * (4 + 4 + 2)
    assert shape.expert_bytes_total == shape.expert_bytes * 4 * 16


def test_layers_of_different_types_add_up() -> None:
    types = (("F32", "F16"), ("Q8_0", "Q8_0"))
    shape = dataclasses.replace(TINY_SHAPE, layers=3, expert_layout="no gate", layer_types=types)
    sizes = [256 * 256 * (4 + 2), 2 * 256 * 256 // 32 * 34]
    assert shape.expert_bytes == sizes[0]
    assert shape.expert_bytes_total == 16 * (2 * sizes[0] + sizes[1])


def test_the_demonstrations_model_is_about_300_mb_of_experts() -> None:
    assert isinstance(DEMO_SHAPE, ModelShape)
    assert 290e6 < DEMO_SHAPE.expert_bytes_total < 300e6
