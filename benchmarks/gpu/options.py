"""The options of `gpu_engine.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from gpu.cold import COLD_ROWS, FILES, FILLS, WAYS, WINDOW
from gpu.models import MODELS
from gpu.parity import PARITY_MODELS
from gpu.rows import CPU_ROWS, GPU_ROWS, SPLIT_ROWS, TENSOR_ROWS

STAGES = ("build", "models", "rows", "moves", "cold", "parity", "table")


def parse(about: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options of `gpu_engine.py`, and give those of a small run to what was not given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="For results.json and, by default, the models."
    )
    parser.add_argument("--model-folder", type=Path, help="For the models: some 6, 10 or 16 GB each.")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["build", "models", "rows", "table"])
    parser.add_argument(
        "--llama-cpp", type=Path, help="A source folder, built or not; else the installed wheel."
    )
    parser.add_argument(
        "--cmake", action="append", default=[], metavar="-DX=Y", help="One more option of the build."
    )
    parser.add_argument("--trace", type=Path, help="Recorded gpt-oss-20b routing (see `expertier synth`).")
    parser.add_argument("--device", default="CUDA0", help="The engine's name of the device.")
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="Split the layers over so many from --device on."
    )
    parser.add_argument("--small", action="store_true", help="A tiny model and short runs.")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="The rows to measure, also rows that the table does not have by default.",
    )
    parser.add_argument("--label", help="Told of our rows, to measure them with other MOE_ variables beside.")
    parser.add_argument("--steps", type=int, help="Timed decode steps.")
    parser.add_argument("--warm", type=int, help="Decode steps before them.")
    parser.add_argument("--prefill", type=int, nargs="*", help="Tokens of the prefills.")
    parser.add_argument("--ctx", type=int)
    parser.add_argument("--ubatch", type=int)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each processor.")
    parser.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--moves-percent", type=int, default=50, help="Stage `moves`: slots, in percent of all expert bytes."
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="Stage `moves`: how often the boundary moves there and back."
    )
    parser.add_argument(
        "--cold-rows", nargs="+", metavar="ROW", default=COLD_ROWS, help="Stage `cold`: which rows."
    )
    parser.add_argument("--cold-ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--cold-files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument(
        "--cold-fill", nargs="+", choices=FILLS, default=FILLS[:1], help="Stage `cold`: MOE_FILL_L2."
    )
    parser.add_argument(
        "--cold-steps", type=int, help="Tokens of a cold start; the profile is of those before."
    )
    parser.add_argument("--cold-prompt", type=int, default=0, help="Tokens of a prompt before them.")
    parser.add_argument("--cold", action="store_true", help="Decode without the warm prefill before it.")
    parser.add_argument("--row-timeout", type=float, default=240, metavar="SECONDS")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="Begin no measurement after so many seconds.",
    )
    parser.add_argument("--again", action="store_true", help="Measure again what was measured already.")
    parser.add_argument(
        "--parity", action="store_true", help="Only compare logits: --stages build parity table."
    )
    parser.add_argument("--parity-models", nargs="+", choices=PARITY_MODELS, default=list(PARITY_MODELS))
    parser.add_argument("--parity-ubatch", type=int, nargs="+", default=[64, 512])
    parser.add_argument(
        "--slots", type=int, nargs="+", help="Slots a layer to compare; else from top-k to all."
    )
    parser.add_argument(
        "--link-gbs", type=float, help="Speed of copies to the device, for the table's bound."
    )
    parser.add_argument(
        "--first-difference",
        action="store_true",
        help="Where logits differ, find the first tensor that does.",
    )
    parser.add_argument("--json", action="store_true", help="Print everything as JSON instead of tables.")
    options = parser.parse_args(arguments)
    if options.devices > 1:
        kind = options.device.rstrip("0123456789")
        if kind == options.device:
            parser.error(f"--devices {options.devices} counts up from a number, as in CUDA0: {kind} has none")
        first = int(options.device.removeprefix(kind))
        options.device = ",".join(f"{kind}{first + i}" for i in range(options.devices))
    several = SPLIT_ROWS
    if options.devices > 1 and TierConfig.from_env().split_mode is SplitMode.TENSOR:
        several = TENSOR_ROWS
        if refused := [row for row in options.rows or () if row.startswith("cache") and "@" not in row]:
            parser.error(
                f"MOE_SPLIT_MODE=tensor has no rows {', '.join(refused)}: llama.cpp's own cache refuses it"
            )
    small = options.small
    defaults = {
        "model_folder": options.folder,
        "models": ["small"] if small else ["gptoss", "qwen"],
        "rows": CPU_ROWS if options.device == "CPU" else several if options.devices > 1 else GPU_ROWS,
        "steps": 48 if small else 808,
        "warm": 16 if small else 100,
        "cold_steps": WINDOW if small else 600,
        "prefill": [64, 256] if small else [512, 2048, 16384],
        "ctx": 512 if small else 20480,
        "ubatch": 128 if small else 2048,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.parity:
        options.stages = ["build", "parity", "table"]
    return options
