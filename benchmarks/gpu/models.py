"""The benchmark's models: random weights of real shapes whose routers replay routing (`trace_model`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_model import trace_tokens, write_trace_model
from expertier.tiers.model.table import ExpertTable
from gpu.routing import I32, made_up_routing, recorded_routing


@dataclass(frozen=True)
class ModelKind:
    """A model of the benchmark, and which routing it replays: a recording's, or made-up routing of `top_k`."""

    name: str
    about: str
    shape: ModelShape
    replays_recording: bool
    recall: float | None = None
    """What share of a layer's experts the layer before foretells; all of them where none is given."""
    recall_of_rare: float | None = None
    """The same of experts that the layer has not used for a while, where it is another."""


def _shape(**changes: object) -> ModelShape:
    given = ModelShape(
        layers=24, experts=32, top_k=4, n_embd=2048, n_ff=2048, heads=32, kv_heads=4, head_dim=128, vocab=300,
        seed=0, gate_up_type="Q4_0", down_type="Q4_0", dense_type="Q8_0", context_length=32768,
    )  # fmt: skip
    return replace(given, **changes)  # type: ignore[arg-type]


MODELS = {
    kind.name: kind
    for kind in (
        ModelKind(
            "gptoss",
            "gpt-oss-20b's routing, 24 layers of 32 experts of 6.75 MiB (5.1 GiB), top-4, Q4_0",
            _shape(),
            True,
        ),
        *(
            ModelKind(
                f"gptoss-r{percent}",
                f"the same, where a layer's state foretells {percent} % of the next layer's experts",
                _shape(),
                True,
                percent / 100,
            )
            for percent in (60, 75, 90)
        ),
        ModelKind(
            "gptoss-ahead",
            "the same, where it foretells 90 % of the usual and 60 % of the rarer experts",
            _shape(),
            True,
            0.9,
            0.6,
        ),
        ModelKind(
            "gptoss-cpu",
            "the same routing, with experts of 0.63 MiB (486 MiB) for a processor",
            _shape(n_embd=768, n_ff=512, heads=12, kv_heads=2, head_dim=64),
            True,
        ),
        ModelKind(
            "gptoss-mxfp4",
            "gpt-oss-20b's routing and its own shape: MXFP4 with biases, experts of 12.6 MiB (9.5 GiB)",
            _shape(
                architecture="gpt-oss", n_embd=2880, n_ff=2880, heads=64, kv_heads=8, head_dim=64,
                gate_up_type="MXFP4", down_type="MXFP4",
            ),
            True,
        ),
        ModelKind(
            "qwen",
            "Qwen3-30B-A3B's shape, 48 layers of 128 experts of 2.5 MiB (15.2 GiB), top-8, Q4_0; made-up routing",
            _shape(layers=48, experts=128, top_k=8, n_ff=768),
            False,
        ),
        ModelKind(
            "small",
            "a model for trying this benchmark: 4 layers of 16 experts, top-4; made-up routing",
            _shape(layers=4, experts=16, top_k=4, n_embd=256, n_ff=256, heads=4, kv_heads=2, head_dim=64),
            False,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class BenchModel:
    """A model that was written."""

    name: str
    path: str
    n_steps: int
    expert_bytes: int
    largest_expert_bytes: int
    seconds: float
    """What writing it took."""

    @property
    def tokens(self) -> list[int]:
        """The tokens that replay its steps."""
        return trace_tokens(self.n_steps)


def ensure_model(
    folder: Path, name: str, *, steps: int, trace: Path | None, say: Callable[[str], None]
) -> BenchModel:
    """Write the model `name` with `steps` steps into `folder`, unless it is there.

    Raises SystemExit where it needs a recording that was not given.
    """
    kind = MODELS[name]
    path = folder / f"{name}-{steps}.gguf"
    told = path.with_suffix(".json")
    if path.exists() and told.exists():
        return BenchModel(**json.loads(told.read_text()))
    say(f"writing {path}: {kind.about}")
    start = time.perf_counter()
    ids = _routing(kind, steps, trace)
    written = write_trace_model(
        path, ids, kind.shape, repeat=True, recall=kind.recall, recall_of_rare=kind.recall_of_rare
    )
    seconds = time.perf_counter() - start
    table = ExpertTable.from_gguf(path)
    largest = max(layout.block_bytes for layout in table.slot_layouts)
    model = BenchModel(name, str(path), written.n_steps, table.expert_bytes_total, largest, seconds)
    told.write_text(json.dumps(asdict(model)))
    return model


def model_routing(model: BenchModel, trace: Path | None) -> I32:
    """Return the routing that a written model replays: int32 [steps, layers, top-k]."""
    return _routing(MODELS[model.name], model.n_steps, trace)


def _routing(kind: ModelKind, steps: int, trace: Path | None) -> I32:
    shape = kind.shape
    if not kind.replays_recording:
        return made_up_routing(steps=steps, layers=shape.layers, experts=shape.experts, top_k=shape.top_k)
    if trace is None:
        raise SystemExit(f"the model {kind.name} replays a recording: give it with --trace FILE")
    return recorded_routing(trace, steps)
