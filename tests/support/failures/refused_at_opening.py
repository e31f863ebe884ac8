"""Devices that refuse a call while a model is opened on them: the first one, then the second, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import DecodeError, DeviceError, EngineError
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import Logits, assert_same, logits_of
from fake_ggml_gpu.process import GpuSession


def check_refusals_at_opening(
    gpus: GpuSession,
    call: str,
    path: Path,
    config: TierConfig,
    prompt: Sequence[int],
    n_tokens: int,
    expected: Logits,
    numbers: Iterable[int],
) -> None:
    """Refuse the n-th `call` of an opening, for each n of `numbers`, until an opening makes fewer calls than that.

    Each refusal is one of our errors and leaves nothing on any device; an opening that works runs the prompt with the
    `expected` logits. Every opening allocates memory and makes streams; pinned memory and events may not be needed.
    """
    table = ExpertTable.from_gguf(path)
    idle = [device.live() for device in gpus.fakes.devices]
    errors = []
    for nth in numbers:
        gpus.fakes.fail(call, nth)
        error = None
        try:
            with TieredModel.open(gpus.engine, table, config) as opened:
                found = logits_of(opened.model, prompt, n_tokens)
        except (DeviceError, EngineError, DecodeError) as raised:
            error = raised
        assert [device.live() for device in gpus.fakes.devices] == idle, f"left after {error}"
        if error is None:
            assert_same(found, expected)
        else:
            errors.append(str(error))
        if gpus.fakes.is_armed(call):
            break
    else:
        raise AssertionError(f"still failing after {errors}")
    assert errors or call in ("pinned", "event")
