"""Runs a tool of the user's own llama.cpp (llama-server, llama-cli, llama-bench) with the tiers in its process.

The tool is started in place of this process, with our proxy as ggml's out-of-tree backend, with the model's skeleton in
place of the model, and with the environment variables that place layers and experts. The proxy then starts a Python
interpreter in the tool, which makes the tiers (embedded.py).
"""

from __future__ import annotations

import json
import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertier.engine_adapter.abi.type_sizes import EngineTypes
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.plugin import Plugin
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.engine_adapter.hosts.exec.options import (
    BUFFER_TYPE,
    DEVICE,
    OVERRIDE_VARIABLE,
    check_options,
    option_name,
    pairs,
)
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.llama_cpp.skeleton import ensure_skeleton
from expertier.engine_adapter.open import prepare_engine
from expertier.engine_adapter.placement.blocks import place_blocks
from expertier.engine_adapter.placement.override_pattern import placed_regex
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import ConfigError, EngineMissingError
from expertier.failures import reason
from expertier.planner.budget.allocate import plan_layers
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.budget import resolve
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.host_memory import available_bytes

MODEL_VARIABLE = "EXPERTIER_EMBED_MODEL"
SHAPE_VARIABLE = "EXPERTIER_EMBED_SHAPE"
_SKELETON_VARIABLE = "EXPERTIER_EMBED_SKELETON"
_MODEL_OPTIONS = ("-m", "--model")


@dataclass(frozen=True)
class ToolCommand:
    """A command to execute: the program, its arguments (its own name first) and its environment."""

    program: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def execute(self) -> None:
        """Replace this process by the tool; does not return. Raises ConfigError where the system cannot start it."""
        try:
            os.execve(self.program, self.arguments, dict(self.environment))
        except OSError as error:
            raise ConfigError(
                f"{self.program} cannot be started: {reason(error)}; give a program of this machine, and fewer or "
                "shorter arguments where the list is too long"
            ) from error


def prepare_tool(
    command: Sequence[str],
    *,
    llama_cpp: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    progress: Progress = silent,
) -> ToolCommand:
    """Build what the tool needs, and return how to run it; everything that can fail early fails here.

    `llama_cpp` is the folder of the llama.cpp that the tool belongs to; without it, the folder whose `build/bin`
    (or `bin`) the tool lies in.

    Raises:
        ConfigError: no tool or no model is named, a variable is bad, or an option does not go with tiers.
        EngineError: the tool's llama.cpp or this Python cannot be used. ModelError, BudgetError: the model or a
            budget cannot.
    """
    if not command:
        raise ConfigError(
            "there is no tool to run; for instance: expertier exec -- llama-server -m MODEL.gguf"
        )
    program = _find_program(command[0])
    arguments, model = _take_model(list(command[1:]), environ)
    folder = llama_cpp or _folder_of(program)

    def loaded() -> LoadedEngine:
        engine, plugin = prepare_engine(folder, progress)
        return LoadedEngine.load(engine.libraries, plugin.proxy_path, plugin.host_path)

    table = ExpertTable.from_gguf(model, EngineTypes(loaded))
    check_options(program.name, arguments, environ, table)
    config = TierConfig.from_env(environ=environ)
    if config.split_mode is SplitMode.TENSOR:
        raise ConfigError(
            f"MOE_SPLIT_MODE=tensor was asked for with {program.name}: tiers inside a tool split layers only; set it "
            "to `layer`, or use `expertier run` or `expertier serve`"
        )
    if config.expert_cache_bytes != "auto":
        _check_budgets(config, table)
    library = _shared_python()
    engine, plugin = prepare_engine(folder, progress)
    shape = _context_shape(arguments, environ, table)
    contexts = ContextShape(n_ctx=shape["n_ctx"], n_ubatch=shape["n_ubatch"], n_seqs=shape["n_seqs"])
    placement = _placement(config, table, contexts, engine, plugin)
    if placement.devices == (
        "CPU",
    ):  # on any other device the budget depends on how much memory is free when the tool starts
        _check_budgets(config, table)
    progress("making the model's skeleton")
    skeleton = ensure_skeleton(table)
    _check_split(program.name, arguments, placement)
    overrides = [
        f"{placed_regex(table.of_layers(layers), is_split=placement.is_split)}={BUFFER_TYPE}{device}"
        for device, layers in zip(placement.devices, placement.layers(table), strict=True)
    ]
    devices, units = [DEVICE + device for device in placement.devices], [*map(str, placement.units)]
    added: dict[str, str] = {}
    if program.name == "llama-bench":  # it reads no variables, and takes a list with commas for several tests
        arguments += ["-dev", "/".join(devices), "-ngl", "999", "-ot", ";".join(overrides), "-lm", "none"]
        arguments += ["-sm", "layer", "-ts", "/".join(units)] if placement.is_split else []
    else:
        added = {
            "LLAMA_ARG_DEVICE": ",".join(devices),
            "LLAMA_ARG_N_GPU_LAYERS": "999",
            OVERRIDE_VARIABLE: ",".join(filter(None, (*overrides, environ.get(OVERRIDE_VARIABLE)))),
            "LLAMA_ARG_LOAD_MODE": "none",
            "LLAMA_ARG_FIT": "off",
        }
        if placement.is_split:
            added |= {"LLAMA_ARG_SPLIT_MODE": "layer", "LLAMA_ARG_TENSOR_SPLIT": ",".join(units)}
    return ToolCommand(
        program,
        (command[0], "-m", str(skeleton), *arguments),
        {
            **environ,
            **added,
            "GGML_BACKEND_PATH": str(plugin.proxy_path),
            MODEL_VARIABLE: str(table.path),
            SHAPE_VARIABLE: json.dumps(shape),
            "MOE_DEVICE": placement.device_name,
            "MOE_TENSOR_SPLIT": ",".join(units),
            **({_SKELETON_VARIABLE: "1"} if skeleton != table.path else {}),
            "EXPERTIER_EMBED_LIBPYTHON": str(library),
            "EXPERTIER_EMBED_HOME": f"{sys.base_prefix}:{sys.base_exec_prefix}",
            "EXPERTIER_EMBED_SITE": ":".join(site.getsitepackages()),
        },
    )


def model_name(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return the file name of the model that a command names; empty where it names none, or several."""
    try:
        return _take_model(list(command[1:]), environ)[1].name
    except ConfigError:
        return ""


def _check_budgets(config: TierConfig, table: ExpertTable) -> None:
    """Raise BudgetError now, where the tool would fail later, after it has loaded half of the model."""
    budgets = resolve(config, table, available_bytes())
    plan_layers(table.layer_demands(), budget_bytes=budgets.expert_cache_bytes)


def _check_split(tool: str, arguments: Sequence[str], placement: Placement) -> None:
    """Raise ConfigError where an option would undo the split over several devices."""
    for name, value in pairs(arguments):
        if placement.is_split and (
            (name in ("-sm", "--split-mode") and value != "layer") or name in ("-dev", "--device")
        ):
            raise ConfigError(
                f"{tool} got {name} {value}, and the layers are split over {placement.device_name}: leave it out, or "
                "name one device in MOE_DEVICE"
            )


def _placement(
    config: TierConfig, table: ExpertTable, shape: ContextShape, engine: Engine, plugin: Plugin
) -> Placement:
    """Return where the blocks are to lie. A build without GPU backends is not loaded, as its only device is the CPU."""
    if config.engine_device == "auto" and not engine.has_gpu_backends:
        return Placement.on_one("CPU")
    loaded = LoadedEngine.load(engine.libraries, plugin.proxy_path, plugin.host_path)
    return place_blocks(loaded.proxy, table, config, shape)


def _context_shape(
    arguments: Sequence[str], environ: Mapping[str, str], table: ExpertTable
) -> dict[str, int]:
    """Return the shape of the tool's contexts, by its options or llama.cpp's defaults, as fields of `ContextShape`."""

    def number(names: Sequence[str], variable: str, default: int) -> int:
        given = [after for name, after in pairs(arguments) if name in names]
        text = given[-1] if given else environ.get(variable, "")
        return int(text) if text.isdigit() and int(text) > 0 else default

    trained = read_geometry(table.path, table.type_sizes).n_ctx_train or 4096
    return {
        "n_ctx": number(("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE", trained),
        "n_ubatch": number(("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH", 512),
        "n_seqs": number(("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL", 1),
    }


def _find_program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise EngineMissingError(
            f"there is no program {name}: build it in your llama.cpp (cmake --build build --target {Path(name).name}) "
            "and give its path, or put it on the PATH"
        )
    return Path(found).resolve()


def _folder_of(program: Path) -> Path:
    folder = program.parent
    if folder.name == "bin":
        folder = folder.parent
    return folder.parent if folder.name.startswith("build") else folder


def _take_model(arguments: list[str], environ: Mapping[str, str]) -> tuple[list[str], Path]:
    """Return the arguments without the model's, and the model."""
    places = [i for i, argument in enumerate(arguments) if option_name(argument) in _MODEL_OPTIONS]
    if len(places) > 1:
        raise ConfigError(
            f"the tool's command names {len(places)} models, the tiers serve one: give -m once, and start another tool "
            "for another model"
        )
    for i in places:
        if i + 1 < len(arguments):
            return arguments[:i] + arguments[i + 2 :], Path(arguments[i + 1])
    if model := environ.get("LLAMA_ARG_MODEL"):
        return arguments, Path(model)
    raise ConfigError(
        "the tool's command names no model: give it one with -m MODEL.gguf, as a file on this machine"
    )


def _shared_python() -> Path:
    """Return this Python's shared library."""
    names = (sysconfig.get_config_var("INSTSONAME"), sysconfig.get_config_var("LDLIBRARY"))
    folders = (
        sysconfig.get_config_var("LIBDIR"),
        sysconfig.get_config_var("LIBPL"),
        f"{sys.base_prefix}/lib",
    )
    for folder in folders:
        for name in names:
            if folder and name and ".so" in str(name) and (path := Path(str(folder), str(name))).exists():
                return path
    raise EngineMissingError(
        f"{sys.executable} has no shared library, which tiers inside a tool need: use a Python that has one, such as "
        f"Debian's and Ubuntu's own (apt install libpython3.{sys.version_info.minor}), or one built with "
        "--enable-shared"
    )
