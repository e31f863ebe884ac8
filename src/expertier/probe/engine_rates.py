"""The engine's own rates, from two small models whose routing is known: one with small experts, one with large experts.

Each model is decoded with a slot for every expert, with fewer slots over the page cache, and with fewer slots over L2.
The difference between the two models separates the cost of a layer from the cost of a byte, and the difference between
their runs is the cost of missed experts.

On a GPU two more costs matter. Each token has a cost of its own (launches, a synchronisation), which two models would
attribute to their layers and bytes; so there is a third, shallow model. And layers without a slot for every expert look
ids up, even if nothing is missing; so there is a run in which such layers hardly miss. No run fetches experts ahead:
how many of those come in time depends on the real model, and made-up models do not show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_model import FIRST_TOKEN, write_trace_model
from expertier.engine_adapter.placement.engine_device import has_own_memory
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.planner.budget.allocate import full_bytes
from expertier.planner.predict.rates import PathRate
from expertier.temporary_folder import temporary_folder
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable

_TOP_K = 4
_STEPS, _WARM, _PROMPT = 36, 4, 64
_GPU_STEPS, _GPU_WARM = 128, 32
"""Tokens to decode. The first tokens are not timed, because a GPU loads kernels and captures graphs during them."""

_ROUNDS = 3
_LEAST_SPREAD = 0.1

_LAYERS = {"small": 12, "large": 6, "shallow": 3}
_EXPERTS = {"small": 64, "large": 32, "shallow": 64}
"""The number of experts, chosen so that the processor's own caches do not hold all of them."""

_WIDTHS = {"small": (512, 256), "large": (1024, 1024)}
_GPU_WIDTHS = {"small": (512, 256), "large": (2048, 2048), "shallow": (512, 256)}
"""Widths of each model and of its experts. On a GPU, kernels over small matrices take as long as empty kernels."""

_NAMES = ("small", "large")


@dataclass(frozen=True, slots=True)
class EngineRates:
    """The times that the engine takes through the tiers; see `MachineRates`."""

    decode: PathRate
    prefill: PathRate
    pool: PathRate
    page_cache: PathRate
    token_s: float = 0.0
    lookup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds for each decoded token, misses for each token, and seconds of the prompt."""

    decode_s: float
    misses: float
    prefill_s: float


def measure_engine(
    engine: LoadedEngine,
    say: Callable[[str], None],
    *,
    n_threads: int = 0,
    rounds: int = _ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    device: str = "CPU",
) -> EngineRates:
    """Write the models to a temporary folder, run them in turns on the engine's `device`, and solve for the rates.

    With one thread, `clock` may be `time.process_time`, which other work on the machine disturbs less. Raises what
    opening a model raises.
    """
    with temporary_folder("expertier-probe-", "the probe's small models") as folder:
        is_gpu = has_own_memory(engine.proxy, device)
        widths, steps = (_GPU_WIDTHS, _GPU_STEPS) if is_gpu else (_WIDTHS, _STEPS)
        models = {name: _write(folder, name, shape, steps, say) for name, shape in widths.items()}
        runs: dict[tuple[str, str], list[_Run]] = {}
        for number in range(rounds):
            for name, path in models.items():
                say(f"decoding a model of {name} experts, {number + 1} of {rounds}")
                table = ExpertTable.from_gguf(path)
                for kind, config in _configs(
                    table, device, is_gpu=is_gpu, only_all=name not in _NAMES
                ).items():
                    run = _run(engine, table, config, n_threads, clock, steps, _GPU_WARM if is_gpu else _WARM)
                    runs.setdefault((name, kind), []).append(run)
        return _solve(runs, {name: _Sizes.of(path) for name, path in models.items()})


@dataclass(frozen=True, slots=True)
class _Sizes:
    layers: int
    token_bytes: int
    expert_bytes: int

    @classmethod
    def of(cls, path: Path) -> _Sizes:
        table, geometry = ExpertTable.from_gguf(path), read_geometry(path)
        expert = table.layers[0].expert_bytes
        experts = sum(layer.top_k * layer.expert_bytes for layer in table.layers)
        return cls(table.n_layers, geometry.device_weight_bytes + experts, expert)


def _write(folder: Path, name: str, widths: tuple[int, int], steps: int, say: Callable[[str], None]) -> Path:
    layers, n_experts = _LAYERS[name], _EXPERTS[name]
    say(f"writing a model of {name} experts")
    random = np.random.default_rng(7)
    ids = np.array(
        [[random.permutation(n_experts)[:_TOP_K] for _ in range(layers)] for _ in range(steps + _PROMPT)],
        np.int32,
    )
    width, n_ff = widths
    shape = ModelShape(
        layers=layers, experts=n_experts, top_k=_TOP_K, n_embd=width, n_ff=n_ff, heads=width // 64,
        kv_heads=max(width // 256, 1), head_dim=64, vocab=FIRST_TOKEN + len(ids), seed=3, gate_up_type="Q4_K",
        down_type="Q6_K", dense_type="Q8_0",
    )  # fmt: skip
    return write_trace_model(folder / f"{name}.gguf", ids, shape, repeat=True).path


def _configs(table: ExpertTable, device: str, *, is_gpu: bool, only_all: bool) -> dict[str, TierConfig]:
    demands = table.layer_demands()
    everything = full_bytes(demands)

    def slots(of: Callable[[int], int]) -> int:
        return sum(demand.bytes_for(of(demand.n_experts)) for demand in demands)

    budgets = {"all": (everything, 0)}
    if not only_all:
        few = slots(lambda n: n // 2)
        budgets |= {"page cache": (few, 0), "pool": (few, 2 * everything)}
    if is_gpu and not only_all:  # one miss in a layer is more usual than two, which share the cost of a wait
        few = slots(lambda n: n - n // 4)
        budgets |= {
            "page cache": (few, 0),
            "pool": (few, 2 * everything),
            "looked up": (slots(lambda n: n - 1), 2 * everything),
        }
    return {
        kind: TierConfig(
            expert_cache_bytes=arena,
            host_pool_bytes=pool,
            engine_device=device,
            decode_prefetch=0,
            fill_pool=False,
        )
        for kind, (arena, pool) in budgets.items()
    }


def _run(
    engine: LoadedEngine,
    table: ExpertTable,
    config: TierConfig,
    n_threads: int,
    clock: Callable[[], float],
    steps: int,
    warm: int,
) -> _Run:
    with (
        TieredModel.open(engine, table, config) as tiered,
        tiered.model.context(n_ctx=2 * (_PROMPT + steps), n_threads=n_threads) as context,
    ):
        prompt = [FIRST_TOKEN + i for i in range(_PROMPT)]
        context.decode(prompt, 0)  # every expert is used once here, so all are in the page cache and in L2
        start = clock()
        context.forget()
        context.decode(prompt, 0)
        prefill_s = clock() - start
        for step in range(warm):
            context.decode([FIRST_TOKEN + _PROMPT + step], _PROMPT + step)
        before = tiered.tiers.stats().l1.misses
        start = clock()
        for step in range(warm, steps):
            context.decode([FIRST_TOKEN + _PROMPT + step], _PROMPT + step)
        decode_s = (clock() - start) / (steps - warm)
        misses = (tiered.tiers.stats().l1.misses - before) / (steps - warm)
    return _Run(decode_s, misses, prefill_s)


def _solve(runs: dict[tuple[str, str], list[_Run]], sizes: dict[str, _Sizes]) -> EngineRates:
    large = sizes["large"]
    decode = {name: median(run.decode_s for run in runs[name, "all"]) for name in sizes}
    token_s, layer_s, byte_s = _computing(decode, sizes)
    prefill_s = median(run.prefill_s for run in runs["large", "all"])
    lookup_s = max(median([_lookup_s(runs, name) / sizes[name].layers for name in _NAMES]), 0.0)
    paths = {}
    for kind in ("page cache", "pool"):
        rows = []
        for name in _NAMES:
            extra = [
                (run.decode_s - unmissed.decode_s - sizes[name].layers * lookup_s) / max(run.misses, 1e-9)
                for run, unmissed in zip(runs[name, kind], runs[name, "all"], strict=True)
            ]
            rows.append((1.0, sizes[name].expert_bytes, max(median(extra), 1e-9)))
        each_s, per_byte = _two_unknowns(rows[0], rows[1])
        paths[kind] = PathRate(1 / per_byte, each_s, _spread(runs, kind), measured=True)
    return EngineRates(
        decode=PathRate(1 / byte_s, layer_s, _spread(runs, "all"), measured=True),
        prefill=PathRate(large.token_bytes * _PROMPT / prefill_s, 0.0, _spread(runs, "all"), measured=True),
        pool=paths["pool"],
        page_cache=paths["page cache"],
        token_s=token_s,
        lookup_s=lookup_s,
    )


def _computing(decode: dict[str, float], sizes: dict[str, _Sizes]) -> tuple[float, float, float]:
    """Return the seconds of a token, of a layer and of a byte; those of a token are 0 without a shallow model."""
    if "shallow" in sizes:
        rows = np.array([[1.0, size.layers, size.token_bytes] for size in sizes.values()])
        found = np.linalg.solve(rows, np.array([decode[name] for name in sizes]))
        if (found >= 0).all() and found[2] > 0:
            return float(found[0]), float(found[1]), float(found[2])
    small, large = (sizes[name] for name in _NAMES)
    return 0.0, *_two_unknowns(
        (small.layers, small.token_bytes, decode["small"]), (large.layers, large.token_bytes, decode["large"])
    )


def _lookup_s(runs: dict[tuple[str, str], list[_Run]], name: str) -> float:
    """Return the time of all look-ups of a token: a run with few misses, without the time of its misses."""
    if (name, "looked up") not in runs:
        return 0.0
    none, many, few = (
        (median(run.decode_s for run in found), median(run.misses for run in found))
        for found in (runs[name, "all"], runs[name, "pool"], runs[name, "looked up"])
    )
    each_s = max(many[0] - few[0], 0.0) / max(many[1] - few[1], 1e-9)
    return few[0] - none[0] - few[1] * each_s


def _two_unknowns(
    first: tuple[float, float, float], second: tuple[float, float, float]
) -> tuple[float, float]:
    """Solve a*x + b*y = t for two (a, b, t), with x of 0 and more, and y above 0."""
    (a, b, s), (c, d, t) = first, second
    found = np.linalg.solve(np.array([[a, b], [c, d]]), np.array([s, t]))
    x, y = float(found[0]), float(found[1])
    if x < 0 or y <= 0:  # noise: attribute all of the larger model's time to bytes
        return 0.0, t / d
    return x, y


def _spread(runs: dict[tuple[str, str], list[_Run]], kind: str) -> float:
    """Return how far apart runs of one kind are: half their range, as a share of the median."""
    shares = [_LEAST_SPREAD]
    for (_, of), found in runs.items():
        if of == kind:
            times = [run.decode_s for run in found]
            shares.append((max(times) - min(times)) / (2 * median(times)))
    return min(max(shares), 0.9)
