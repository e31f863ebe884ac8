"""One side of `larger_than_ram.py`, in a process of its own: the wheel's llama-server, stock or through the tiers.

    python benchmarks/decode_side.py SIDE MODEL --steps N --warm N --threads N [--cache-mib N]

SIDE is `stock-mmap`, `stock-none`, `stock-dio` (the engine's load modes, without weight repacking, which would keep a
second copy of all weights) or `tiers-auto`, `tiers-page-cache`, `tiers-direct` (the tiers' file modes). MODEL is a
trace model (`expertier synth`), which replays its recording when it decodes greedily; that it did is checked. Prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from expertier.engine_adapter.hosts.measured_run import rss_peak_bytes
from expertier.engine_adapter.hosts.server.server import ServerOptions, TieredServer, stock_params
from expertier.engine_adapter.models.trace_model import FIRST_TOKEN
from expertier.engine_adapter.open import open_engine
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.model.table import ExpertTable

_LOAD_MODES = {
    "stock-mmap": "LLAMA_LOAD_MODE_MMAP",
    "stock-none": "LLAMA_LOAD_MODE_NONE",
    "stock-dio": "LLAMA_LOAD_MODE_DIRECT_IO",
}
_TIMEOUT_S = 600


def io_bytes() -> int:
    """Bytes that this process has had read from disks so far, page faults and read-ahead included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def complete(url: str, tokens: list[int], n: int) -> dict[str, Any]:
    """Continue `tokens` by `n` greedy tokens; returns the server's answer."""
    body = {
        "prompt": tokens,
        "n_predict": n,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "cache_prompt": True,
        "ignore_eos": True,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return dict(json.load(answer))


def measure(url: str, warm: int, steps: int) -> dict[str, Any]:
    """Decode `warm` tokens, then `steps` that are timed by the server itself."""
    first = complete(url, [FIRST_TOKEN], warm)
    read_before, faults_before = io_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    second = complete(url, [FIRST_TOKEN, *first["tokens"]], steps)
    made = [*first["tokens"], *second["tokens"]]
    return {
        "tokens_per_s": second["timings"]["predicted_per_second"],
        "warm_tokens_per_s": first["timings"]["predicted_per_second"],
        "steps": len(second["tokens"]),
        "replayed": made == list(range(FIRST_TOKEN + 1, FIRST_TOKEN + 1 + warm + steps)),
        "disk_bytes_a_token": (io_bytes() - read_before) / len(second["tokens"]),
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults_before,
    }


def main() -> None:
    """Run one side and print what it did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=[*_LOAD_MODES, *(f"tiers-{mode}" for mode in FileMode)])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-mib", type=int, default=0)
    options = parser.parse_args()
    server_options = ServerOptions(
        port=0,
        n_ctx=options.steps + options.warm + 64,
        n_ubatch=16,
        n_threads=options.threads,
        verbosity=1,
    )
    engine = open_engine()
    before_load = time.perf_counter()
    result: dict[str, Any] = {"side": options.side}
    with ExitStack() as stack:
        tiers = None
        if options.side in _LOAD_MODES:
            import xllamacpp

            params = stock_params(str(options.model), server_options)
            params.load_mode = getattr(xllamacpp.llama_load_mode, _LOAD_MODES[options.side])
            server = xllamacpp.Server(params)
            url = server.listening_address
        else:
            config = TierConfig(
                expert_cache_bytes=options.cache_mib << 20,
                host_pool_bytes=0,
                file_mode=FileMode(options.side.removeprefix("tiers-")),
            )
            table = ExpertTable.from_gguf(options.model)
            tiered = stack.enter_context(TieredServer.start(engine, table, config, server_options))
            url, tiers = tiered.url, tiered.tiers
        result["load_s"] = time.perf_counter() - before_load
        result |= measure(url, options.warm, options.steps)
        if tiers is not None:
            l1 = tiers.stats().l1
            result["hit_rate"] = l1.hits / (l1.hits + l1.misses)
            result["slots"] = l1.slots
        result["rss_peak_mib"] = rss_peak_bytes() / (1 << 20)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
