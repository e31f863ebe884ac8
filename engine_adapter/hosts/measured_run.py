"""One measured generation in a process of its own, on the stock engine or through the tiers.

`python -m expertier.engine_adapter.hosts.measured_run OPTIONS`, where OPTIONS is `RunOptions` as JSON, prints one line
of JSON, `RunResult`. In a process of its own, peak memory and loaded devices are those of this run alone.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from expertier.atomic_file import output
from expertier.children import run_child
from expertier.engine_adapter.abi.type_sizes import EngineTypes
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.engine_adapter.open import open_engine
from expertier.errors import EngineError, ExpertierError
from expertier.failures import explain
from expertier.hip import open_device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.layer_division import LayerDivision
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class RunOptions:
    """What to run. `tiers` False is the stock engine, with its own weight repacking if `repack`."""

    model: str
    prompt: list[int]
    n_tokens: int
    tiers: bool = False
    repack: bool = False
    expert_cache_bytes: int = 0
    host_pool_bytes: int = 0
    n_ctx: int = 1024
    n_ubatch: int = 512
    n_threads: int = 0
    llama_cpp: str | None = None
    logits_path: str | None = (
        None  # the file for the logits, float32 [prompt + steps, n_vocab]; None saves no logits
    )


@dataclass(frozen=True)
class RunResult:
    """The results. The numbers of the tiers are empty for the stock engine."""

    tokens: list[int]
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    rss_peak_bytes: int
    load_s: float
    n_graph_splits: int | None
    flash_attention: bool
    stats: dict[str, Any] = field(default_factory=dict)
    proxy: dict[str, int] = field(default_factory=dict)
    load: dict[str, int] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)


def run_in_child(options: RunOptions) -> RunResult:
    """Run `options` in a child process and return its result.

    Raises:
        EngineError: the child failed; the message has the last lines that it printed.
    """
    child = run_child(
        [
            sys.executable,
            "-m",
            "expertier.engine_adapter.hosts.measured_run",
            json.dumps(dataclasses.asdict(options)),
        ]
    )
    if child.returncode != 0:
        kind = "through the tiers" if options.tiers else "on the stock engine"
        raise EngineError(
            f"the run {kind} ended with status {child.returncode}: {(child.stderr or child.stdout).strip()[-2000:]}"
        )
    return RunResult(**json.loads(child.stdout.splitlines()[-1]))


def run(options: RunOptions) -> RunResult:
    """Run `options` in this process."""
    engine = open_engine(options.llama_cpp)
    tiers = None
    if options.tiers:
        table = ExpertTable.from_gguf(options.model, EngineTypes(lambda: engine))
        tiers = TierSet(
            LayerDivision.on_one(table, open_device("host")),
            config=TierConfig(
                expert_cache_bytes=options.expert_cache_bytes, host_pool_bytes=options.host_pool_bytes
            ),
        )
    try:
        before_load = time.perf_counter()
        with LlamaModel.open(engine, options.model, tiers=tiers, repack=options.repack) as model:
            load_s = time.perf_counter() - before_load
            with model.context(
                n_ctx=options.n_ctx, n_ubatch=options.n_ubatch, n_threads=options.n_threads
            ) as context:
                done = generate(
                    context, options.prompt, options.n_tokens, keep_logits=options.logits_path is not None
                )
                splits, flash = context.n_graph_splits, context.flash_attention_enabled
            if tiers is not None:
                tiers.check_valid()
            result = RunResult(
                tokens=done.tokens,
                prefill_tokens_per_s=done.prefill_tokens_per_s,
                decode_tokens_per_s=done.decode_tokens_per_s,
                rss_peak_bytes=rss_peak_bytes(),
                load_s=load_s,
                n_graph_splits=splits,
                flash_attention=flash,
                stats=tiers.stats().as_dict() if tiers is not None else {},
                proxy=model.binding.counters().as_dict() if model.binding is not None else {},
                load=dataclasses.asdict(model.load_counts()),
                plugin={"api_version": engine.api_version, "ggml_version": engine.ggml_version}
                if tiers is not None
                else {},
            )
    finally:
        if tiers is not None:
            tiers.close()
    if options.logits_path is not None:
        with output(options.logits_path, "the logits") as unfinished, unfinished.open("xb") as file:
            np.save(file, np.stack(done.logits))
    return result


def rss_peak_bytes() -> int:
    """Return the most resident memory that this process has had, file pages that it maps included (VmHWM)."""
    with suppress(OSError):  # there may be no /proc
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Run the options on the command line."""
    try:
        result = run(RunOptions(**json.loads(sys.argv[1])))
    except ExpertierError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        print(explain(error), file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
