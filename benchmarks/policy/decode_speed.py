"""Which eviction policy decodes fastest on the real engine: a trace model, policies in turns, each in its own process.

    python benchmarks/policy/decode_speed.py TRACES/gptoss20b/gptoss20b_ids_only.npz
        [--slots 8 --file-mode direct ...] [--json]

It writes a model of the recording's shape (24 layers, top-4 of 32, experts of about 1.3 MiB) that replays sequences
which were not used to tune any policy, and decodes it greedily through the tiers on the CPU, without L2. It checks that
the routing was the recorded one. Speeds are of the decode steps alone, from cold tables; a ratio is of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_model import FIRST_TOKEN, write_trace_model
from expertier.engine_adapter.open import open_engine, prepare_engine
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.planner.policy.kind import PolicyKind
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.model.table import ExpertTable

HELD_OUT = np.random.default_rng(1).permutation(560)[200:300]
SHAPE = ModelShape(
    layers=24, experts=32, top_k=4, n_embd=768, n_ff=1024, heads=12, kv_heads=12, head_dim=64, vocab=300, seed=0,
    gate_up_type="Q4_K", down_type="Q6_K", dense_type="Q8_0",
)  # fmt: skip


def steps_of(trace: Path, n: int) -> np.ndarray:
    """Return the first `n` steps of the held-out sequences, int32 [n, 24, 4]."""
    with np.load(trace) as recorded:
        ids, offsets = recorded["ids"], recorded["offsets"]
        pieces = [ids[offsets[i] : offsets[i + 1]] for i in HELD_OUT]
    return np.ascontiguousarray(np.concatenate(pieces)[:n].astype(np.int32))


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Decode the model through one policy, in this process."""
    table = ExpertTable.from_gguf(options.child)
    config = TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(options.slots) for demand in table.layer_demands()),
        host_pool_bytes=0,
        policy=PolicyKind(options.policy),
        file_mode=FileMode(options.file_mode),
    )
    n = options.steps
    with TieredModel.open(open_engine(), table, config) as tiered:
        done = tiered.generate([FIRST_TOKEN], n - 1, n_ctx=n + 8, n_ubatch=16, n_threads=options.threads)
        l1 = tiered.tiers.stats().l1
    return {
        "policy": options.policy,
        "tokens_per_s": done.decode_tokens_per_s,
        "hit_rate": l1.hits / (l1.hits + l1.misses),
        "mib_a_token": l1.bytes_in / n / (1 << 20),
        "replayed": list(done.tokens) == list(range(FIRST_TOKEN + 1, FIRST_TOKEN + n)),
    }


def run_child(model: Path, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Decode in a process of its own."""
    command = [
        *(sys.executable, __file__, str(options.trace), "--child", str(model), "--policy", policy),
        *("--slots", str(options.slots), "--steps", str(options.steps), "--threads", str(options.threads)),
        *("--file-mode", options.file_mode),
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(child.stderr[-2000:])
    return dict(json.loads(child.stdout.splitlines()[-1]))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the model and run all policies in turns."""
    prepare_engine(None, lambda message: print(message, file=sys.stderr))
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="expertier-policy-")
        )
        model = Path(folder) / f"policy-{options.steps}.gguf"
        if not model.exists():
            write_trace_model(model, steps_of(options.trace, options.steps), SHAPE, repeat=True)
        rounds = []
        for number in range(options.rounds):
            rounds.append({policy: run_child(model, policy, options) for policy in options.policies})
            print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    rows = []
    for policy in options.policies:
        ratios = [one[policy]["tokens_per_s"] / one[options.policies[0]]["tokens_per_s"] for one in rounds]
        rows.append(
            {
                **rounds[0][policy],
                "tokens_per_s": statistics.median(one[policy]["tokens_per_s"] for one in rounds),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "replayed": all(one[policy]["replayed"] for one in rounds),
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", nargs="+", default=[kind.value for kind in PolicyKind])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--file-mode", default="direct", choices=[mode.value for mode in FileMode])
    parser.add_argument("--folder", type=Path, help="Keep the model here, and use it again.")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(decode(options)))
        return
    rows = measure(options)
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['policy']:10} {row['tokens_per_s']:7.2f} tokens/s, {row['ratio']:.2f} times {options.policies[0]} "
            f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f}), {100 * row['hit_rate']:.2f} % hits, "
            f"{row['mib_a_token']:.1f} MiB a token{'' if row['replayed'] else ', NOT the recorded routing'}"
        )


if __name__ == "__main__":
    main()
