"""`expertier synth`: a random model of chosen sizes whose routers replay recorded routing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from expertier.atomic_file import check_output
from expertier.cli import report
from expertier.engine_adapter.models.model_shape import ExpertLayout, ModelShape
from expertier.engine_adapter.models.synth_arch import ARCHITECTURES
from expertier.engine_adapter.models.synth_blocks import WEIGHT_TYPES, WeightType
from expertier.engine_adapter.models.trace_ids import read_trace_ids
from expertier.engine_adapter.models.trace_model import FIRST_TOKEN, default_width, write_trace_model
from expertier.errors import ConfigError
from expertier.failures import reason, remedy
from expertier.units import mib

_HEAD_DIM = 64
_TYPES = ", ".join(WEIGHT_TYPES)
_ARCHITECTURES = ", ".join(name for name, arch in ARCHITECTURES.items() if arch.replays)


def synth(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Recorded routing: .npz with `ids` [steps, layers, top-k], or .npy."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="MODEL", help="The GGUF to write.")],
    sequence: Annotated[
        int | None,
        typer.Option(min=0, help="The sequence of the file to replay; by default all, one after another."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to replay, at most.")] = 1000,
    architecture: Annotated[str, typer.Option(metavar="NAME", help=f"{_ARCHITECTURES}.")] = "qwen3moe",
    layout: Annotated[str, typer.Option(help="Matrices of an expert: split, fused, or no gate.")] = "split",
    experts: Annotated[
        int | None,
        typer.Option(min=1, help="Experts a layer; by default the next power of two above the ids."),
    ] = None,
    n_embd: Annotated[
        int | None,
        typer.Option(min=32, help="Width of the model; by default the width that any number of steps needs."),
    ] = None,
    n_ff: Annotated[int, typer.Option(min=1, help="Width of an expert.")] = 256,
    gate_up_type: Annotated[str, typer.Option(metavar="TYPE", help=f"One of {_TYPES}.")] = "Q4_K",
    down_type: Annotated[str, typer.Option(metavar="TYPE", help=f"One of {_TYPES}.")] = "Q6_K",
    dense_type: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of all tensors that are not experts.")
    ] = "Q8_0",
    heads: Annotated[
        int | None, typer.Option(min=1, help=f"Attention heads; by default n_embd / {_HEAD_DIM}.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of keys and values; by default as many as --heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=2, help="Width of a head.")] = _HEAD_DIM,
    ctx: Annotated[
        int, typer.Option(min=1, help="Context length to write; at least twice the steps.")
    ] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    repeat: Annotated[
        bool,
        typer.Option(help="Repeat a block of 32 MiB in the experts, which is as fast as the disk writes."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Write a random model whose routers pick, at each step and in each layer, the experts of a recording.

    Decoding greedily from the beginning of text replays it; so does feeding tokens first_token, first_token + 1, …
    """
    check_output(output, "the model")
    ids = read_trace_ids(trace, sequence=sequence, steps=steps)
    n_layers = ids.shape[1]
    n_experts = experts or 1 << int(ids.max()).bit_length()
    kinds = [_weight_type(kind) for kind in (gate_up_type, down_type, dense_type)]
    width = n_embd or default_width(n_layers, n_experts, kinds[0])
    n_heads = heads or max(width // _HEAD_DIM, 1)
    shape = ModelShape(
        layers=n_layers,
        experts=n_experts,
        top_k=ids.shape[2],
        n_embd=width,
        n_ff=n_ff,
        heads=n_heads,
        kv_heads=kv_heads or n_heads,
        head_dim=head_dim,
        vocab=FIRST_TOKEN + len(ids),
        seed=seed,
        gate_up_type=kinds[0],
        down_type=kinds[1],
        dense_type=kinds[2],
        context_length=ctx,
        architecture=architecture,
        expert_layout=cast(ExpertLayout, layout),
    )
    start = time.perf_counter()
    with report.progress(Console(stderr=True)) as say:
        say(f"writing {output}, {mib(shape.expert_bytes_total)} of it experts")
        try:
            model = write_trace_model(output, ids, shape, repeat=repeat)
        except OSError as error:
            raise ConfigError(
                f"the model cannot be written to {output}: {reason(error)}; {remedy(error)}"
            ) from error
    document: dict[str, Any] = {
        "model": str(model.path),
        "file_bytes": model.path.stat().st_size,
        "expert_bytes": model.shape.expert_bytes_total,
        "architecture": architecture,
        "layers": n_layers,
        "experts": n_experts,
        "top_k": model.shape.top_k,
        "n_embd": width,
        "steps": model.n_steps,
        "first_token": FIRST_TOKEN,
        "codes": "per-layer" if model.per_layer else "orthogonal",
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        print(json.dumps(document))
        return
    fields = {
        **document,
        "file_bytes": mib(document["file_bytes"]),
        "expert_bytes": mib(document["expert_bytes"]),
        "seconds": f"{document['seconds']:.1f}",
    }
    report.print_fields("trace model", fields, Console())


def _weight_type(name: str) -> WeightType:
    for kind in WEIGHT_TYPES:
        if kind == name:
            return kind
    raise ConfigError(f"no weights of type {name!r} can be made: give one of {_TYPES}")
