"""Computes the logits that `parity` compares; run by `child` with `SidesOptions` as JSON.

The batches, in one context of `n_ubatch`: a wide prefill; then, from an empty cache, forced tokens in shapes of 1 to 8
tokens, each several times; then, from an empty cache again, another wide prefill and single tokens after it. So the
context goes from wide to narrow and back, and narrow batches do not build on the results of a wide batch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.binding import slab_compute
from expertier.engine_adapter.llama_cpp import LlamaContext, LoadedEngine
from expertier.engine_adapter.open import open_engine
from expertier.planner.budget.context_memory import ContextShape
from gpu.child import answer, tell
from gpu.opening import Placement, opened
from gpu.row_run import compute_counts

F32 = npt.NDArray[np.float32]

FIRST_PREFILL, SECOND_PREFILL = 300, 512
SHAPES = range(1, 9)
_TIMES = 3  # each shape
_SINGLE = 16  # tokens after the second prefill
_N_CTX = 1024


@dataclass(frozen=True)
class SidesOptions:
    """What to compute: every side, by its label; `folder` is where their logits go, LABEL.npz.

    With `keeps_tensors`, all tensors go there too, LABEL.tensors: some hundred MiB a side.
    """

    path: str
    sides: dict[str, Placement]
    first_token: int
    n_ubatch: int
    n_threads: int
    flash_attention: str
    folder: str
    keeps_tensors: bool
    llama_cpp: str | None


def segments(context: LlamaContext, draw: np.random.Generator, first: int, last: int) -> dict[str, F32]:
    """Run all batches, of tokens in [first, last); returns logits by segment: float32 [tokens, n_vocab]."""
    found: dict[str, F32] = {}

    def run(name: str, shapes: list[int], position: int) -> int:
        rows = []
        for n in shapes:
            context.decode(draw.integers(first, last, n).tolist(), position, all_logits=True)
            rows += [context.logits(i) for i in range(n)]
            position += n
        found[name] = np.stack(rows)
        return position

    run(f"prefill {FIRST_PREFILL}", [FIRST_PREFILL], 0)
    context.forget()
    at = 0
    for shape in SHAPES:
        at = run(f"decode {shape}", [shape] * (_SINGLE if shape == 1 else _TIMES), at)
    context.forget()
    at = run(f"prefill {SECOND_PREFILL}", [SECOND_PREFILL], 0)
    run("decode 1 after it", [1] * _SINGLE, at)
    return found


def compute(engine: LoadedEngine, options: SidesOptions, label: str, placement: Placement) -> dict[str, Any]:
    """Compute one side, save its logits and return what was counted."""
    kept = Path(options.folder) / label
    shape = ContextShape(n_ctx=_N_CTX, n_ubatch=options.n_ubatch, full_windows=True)
    with opened(engine, options.path, placement, shape) as (model, tiers):
        with model.context(
            n_ctx=_N_CTX,
            n_batch=SECOND_PREFILL,
            n_ubatch=options.n_ubatch,
            n_threads=options.n_threads,
            flash_attention=options.flash_attention,
            tensors_path=f"{kept}.tensors" if options.keeps_tensors else None,
        ) as context:
            found = segments(context, np.random.default_rng(1), options.first_token, model.n_vocab)
            splits = context.n_graph_splits
        np.savez(f"{kept}.npz", **found)  # type: ignore[arg-type]
        if tiers is not None:
            tiers.check_valid()
        counts = model.binding.counters().as_dict() if model.binding is not None else {}
        compute = compute_counts(model)
    return {"proxy": counts, "n_graph_splits": splits, "compute": compute}


def main(given: dict[str, Any]) -> None:
    """Compute what was asked for, and tell after each side."""
    sides = {label: Placement(**placement) for label, placement in given["sides"].items()}
    options = SidesOptions(**{**given, "sides": sides})
    done: dict[str, Any] = {}
    slab_compute.MOVE_COST_BYTES = 0  # the boundary is to move as often as it can
    engine = open_engine(options.llama_cpp)
    for label, placement in options.sides.items():
        done[label] = compute(engine, options, label, placement)
        tell({"done": done})


if __name__ == "__main__":
    sys.exit(answer(main))
