"""Options of llama.cpp's tools that do not work with tiers; they are refused before the tool is started.

The effect of each option was tried with llama-server. Some options crash the tool (`--device none`, `--split-mode
tensor`), some change the results (`-ngl 0` ends flash attention), and some do nothing where a user expects an effect
(`--cpu-moe`, whose pattern comes after ours). The proxy notices what this list misses: when experts are placed
elsewhere, or are of another model, every batch fails (find_misplacement in ggml_proxy/backend/expert_buffer.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from expertier.errors import ConfigError
from expertier.tiers.model.table import ExpertTable

DEVICE, BUFFER_TYPE = "TIER_", "EXPERTS_"  # and the inner device's name (device.cpp)
OVERRIDE_VARIABLE = "LLAMA_ARG_OVERRIDE_TENSOR"

_OFF = frozenset({"off", "disabled", "false", "0"})
_ALL_LAYERS = frozenset({"all", "auto"})

Refuses = Callable[[str, ExpertTable], bool]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An option that is refused: with any value, or with the values that `refuses` says.

    `variable` is the environment variable that means the same to a tool as the option. A variable that `expertier exec`
    sets is not listed, because our value replaces the user's.
    """

    names: tuple[str, ...]
    why: str
    advice: str
    variable: str = ""
    takes_value: bool = True
    refuses: Refuses = lambda _value, _table: True


def _is_on(value: str, _table: ExpertTable) -> bool:
    return value not in _OFF


def _is_fewer_layers(value: str, table: ExpertTable) -> bool:
    n_blocks = max(layer.block for layer in table.layers) + 1
    return value not in _ALL_LAYERS and value.isdecimal() and int(value) <= n_blocks


def _touches_experts(value: str, table: ExpertTable) -> bool:
    """Whether one of the patterns matches an expert tensor, or one of the buffers is ours."""
    names = [matrix.name for layer in table.layers for matrix in layer.matrices]
    for override in re.split("[,;]", value):
        pattern, _, buffer_type = override.partition("=")
        try:
            matches = any(re.search(pattern, name) for name in names)
        except re.error:  # the tool will report the malformed pattern itself
            matches = False
        if matches or buffer_type.startswith("EXPERTS_"):
            return True
    return False


_LEAVE_OUT = "leave it out"
_EXPERTS_ARE_SERVED = "the experts are in the tiers, so it would have no effect"
_BUDGETS = "leave it out, and set MOE_EXPERT_CACHE_MIB and MOE_HOST_POOL_MIB"
_ONE_MODEL = "the tiers are made for the one model of -m, and would serve its experts to any other model"
_ONE_TEST = "exec gives llama-bench this option itself, and a second value would run each test once more"

_COMMON = (
    *(
        Refusal(names, _ONE_MODEL, "download the model first, and name its file", variable)
        for names, variable in (
            (("-mu", "--model-url"), "LLAMA_ARG_MODEL_URL"),
            (("-hf", "-hfr", "--hf-repo"), "LLAMA_ARG_HF_REPO"),
            (("-dr", "--docker-repo"), "LLAMA_ARG_DOCKER_REPO"),
        )
    ),
    Refusal(("--check-tensors",), "it would check a copy without experts", _LEAVE_OUT, takes_value=False),
)

_SERVER = (
    *_COMMON,
    Refusal(("--models-dir", "--models-preset"), _ONE_MODEL, _LEAVE_OUT),
    Refusal(
        ("-fit", "--fit"),
        "the tool would place layers and tensors anew to make them fit",
        _BUDGETS,
        refuses=_is_on,
    ),
    Refusal(
        ("-dev", "--device"),
        f"only a device of ours, such as {DEVICE}CPU, can compute with experts in the tiers",
        "leave it out, and choose with MOE_DEVICE",
        refuses=lambda value, _: not value.startswith(DEVICE),
    ),
    Refusal(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        "layers outside of our device are computed without flash attention, which gains nothing",
        "leave it out, or give 999",
        refuses=_is_fewer_layers,
    ),
    Refusal(("-cmoe", "--cpu-moe"), _EXPERTS_ARE_SERVED, _BUDGETS, "LLAMA_ARG_CPU_MOE", takes_value=False),
    Refusal(("-ncmoe", "--n-cpu-moe"), _EXPERTS_ARE_SERVED, _BUDGETS, "LLAMA_ARG_N_CPU_MOE", refuses=_is_on),
    Refusal(
        ("-ot", "--override-tensor"),
        _EXPERTS_ARE_SERVED,
        "give patterns that match no ffn_*_exps tensor",
        OVERRIDE_VARIABLE,
        refuses=_touches_experts,
    ),
    Refusal(
        ("-otd", "--spec-draft-override-tensor", "--override-tensor-draft"),
        f"{BUFFER_TYPE}... is for the experts of the model of -m",
        "give it another buffer type",
        "LLAMA_ARG_SPEC_DRAFT_OVERRIDE_TENSOR",
        refuses=lambda value, _: "EXPERTS_" in value,
    ),
    Refusal(
        ("--moe-cache-mib",),
        "llama.cpp's own cache takes experts from host memory only, and would hold nothing",
        _BUDGETS,
        "LLAMA_ARG_MOE_CACHE_MIB",
        refuses=_is_on,
    ),
    Refusal(
        ("-lm", "--load-mode"),
        "a mapping keeps memory for all experts, read or not, and mlock pins it",
        "leave it out, or give none or dio",
        refuses=lambda value, _: value not in ("none", "dio"),
    ),
    Refusal(
        ("--mlock", "--mmap"),
        "a mapping keeps memory for all experts, read or not, and mlock pins it",
        _LEAVE_OUT,
        takes_value=False,
    ),
    Refusal(
        ("-ts", "--tensor-split"),
        "the tiers of each device hold the experts of its own layers",
        "leave it out, and set MOE_TENSOR_SPLIT",
        "LLAMA_ARG_TENSOR_SPLIT",
    ),
    Refusal(
        ("-sm", "--split-mode"),
        "tensors are not split over devices here",
        "leave it out, or give layer or none",
        "LLAMA_ARG_SPLIT_MODE",
        refuses=lambda value, _: value not in ("none", "layer"),
    ),
)

_BENCH = (
    *_COMMON,
    *(
        Refusal(names, _ONE_TEST, _LEAVE_OUT)
        for names in (
            ("-dev", "--device"),
            ("-ngl", "--n-gpu-layers"),
            ("-ot", "--override-tensor"),
            ("-lm", "--load-mode"),
            ("-ts", "--tensor-split"),
        )
    ),
    Refusal(("-ncmoe", "--n-cpu-moe"), _EXPERTS_ARE_SERVED, _BUDGETS, refuses=_is_on),
    Refusal(
        ("-sm", "--split-mode"),
        "tensors are not split over devices here",
        _LEAVE_OUT,
        refuses=lambda value, _: value not in ("none", "layer"),
    ),
    Refusal(
        ("-fitt", "--fit-target", "-fitc", "--fit-ctx"),
        "the tool would place layers and tensors anew to make them fit",
        _BUDGETS,
    ),
)


def check_options(
    tool: str, arguments: Sequence[str], environ: Mapping[str, str], table: ExpertTable
) -> None:
    """Raise ConfigError where one of the tool's arguments or variables does not work with the tiers."""
    is_bench = tool == "llama-bench"
    refusals = _BENCH if is_bench else _SERVER  # llama-cli has the server's options
    by_name = {name: refusal for refusal in refusals for name in refusal.names}
    for name, value in pairs(arguments):
        refusal = by_name.get(name)
        if refusal is not None and (not refusal.takes_value or refusal.refuses(value, table)):
            given = f"{name} {value}" if refusal.takes_value else name
            raise ConfigError(_message(tool, given, refusal))
    for refusal in () if is_bench else refusals:  # llama-bench reads no variables
        text = environ.get(refusal.variable) if refusal.variable else None
        if text and (refusal.takes_value or text not in _OFF) and refusal.refuses(text, table):
            raise ConfigError(_message(tool, f"{refusal.variable}={text}", refusal))


def option_name(argument: str) -> str:
    """Return an argument as the tools compare it with their options."""
    return argument.replace("_", "-") if argument.startswith("--") else argument


def _message(tool: str, given: str, refusal: Refusal) -> str:
    return f"{tool} got {given}: {refusal.why}; {refusal.advice}"


def pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield every argument with the next argument, as only the tool knows which arguments are values."""
    yield from zip_longest(map(option_name, arguments), arguments[1:], fillvalue="")
