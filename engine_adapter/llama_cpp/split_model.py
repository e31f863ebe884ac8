"""Models that llama.cpp splits tensor by tensor among devices (`--split-mode tensor`), stock or through tiers.

The engine's own rule says which part of a tensor a device gets. It is asked once, with nothing but the model's metadata
loaded, before any memory is taken.
"""

from __future__ import annotations

import ctypes as ct
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from expertier.engine_adapter import proxy_abi as abi
from expertier.engine_adapter.llama_cpp.engine import LoadedEngine
from expertier.engine_adapter.llama_cpp.model import LlamaModel
from expertier.engine_adapter.llama_cpp.split_binding import SplitBinding
from expertier.engine_adapter.loader_view import loader_view
from expertier.engine_adapter.override_pattern import experts_regex
from expertier.errors import ConfigError, DeviceError, EngineError, EngineMismatchError
from expertier.tiers.table import ExpertTable
from expertier.tiers.tensor_cut import TensorCut

_ERROR_BYTES = 1 << 14
_MIRRORED = 10  # GGML_BACKEND_SPLIT_AXIS_MIRRORED


@dataclasses.dataclass(frozen=True)
class EngineSplit:
    """How the engine splits the expert tensors `names` of a model among `devices`, as it says it itself.

    `shares` are the devices' parts as `--tensor-split` gives them; None for equal ones.
    """

    devices: tuple[str, ...]
    shares: tuple[float, ...] | None
    names: tuple[str, ...]
    splits: tuple[abi.Split, ...]

    def cuts(self) -> dict[str, TensorCut]:
        """Return the cut of each tensor by its name."""
        n = len(self.devices)
        return {
            name: TensorCut.mirrored(n) if split.axis == _MIRRORED else _cut(split, n)
            for name, split in zip(self.names, self.splits, strict=True)
        }


def ask_split(
    engine: LoadedEngine,
    table: ExpertTable,
    devices: Sequence[str],
    shares: Sequence[float] | None = None,
) -> EngineSplit:
    """Ask the engine how it would split the model's experts among its devices of these names.

    Only metadata is loaded. Raises:
        DeviceError: the engine has no such device. ConfigError: `shares` are not one a device. EngineError: it cannot
            split this architecture, with its own words. EngineMismatchError: this build does not tell.
    """
    own = (ct.c_void_p * len(devices))(*(_device(engine, name) for name in devices))
    options = _split_options(table.path, own, shares)
    options.is_measured = 1
    tensors = [
        (matrix.name, abi.WholeTensor(matrix.name.encode(), matrix.ggml_type, (matrix.ne0, matrix.ne1, n, 1)))
        for layer in table.layers
        for n, matrices in [(layer.n_experts, layer.matrices)]
        for matrix in matrices
    ]
    asked = (abi.WholeTensor * len(tensors))(*(tensor for _, tensor in tensors))
    splits = (abi.Split * len(tensors))()
    handle = _open(engine, table.path, options)
    try:
        told = engine.host.expertier_model_splits(handle, len(devices), asked, len(tensors), splits)
    finally:
        engine.host.expertier_model_close(handle)
    if told < 0:
        raise EngineError(f"no memory to ask how {len(tensors)} tensors are split: free some")
    if not told:
        raise EngineMismatchError(
            f"{engine.library_paths[-1]} does not say how it splits tensors among {len(devices)} devices (it keeps "
            "llama_meta_device_get_split_state to itself): use --split-mode layer, the wheel, or a build of llama.cpp "
            "without hidden symbols"
        )
    return EngineSplit(
        tuple(devices),
        None if shares is None else tuple(shares),
        tuple(name for name, _ in tensors),
        tuple(splits),
    )


def open_split_model(
    engine: LoadedEngine,
    path: str | os.PathLike[str],
    devices: Sequence[str],
    shares: Sequence[float] | None = None,
) -> LlamaModel:
    """Load a model as stock llama.cpp does with `--split-mode tensor --device A,B`: to compare with.

    Raises as `ask_split` does.
    """
    own = (ct.c_void_p * len(devices))(*(_device(engine, name) for name in devices))
    options = _split_options(Path(os.fspath(path)), own, shares)
    return LlamaModel(engine, _open(engine, Path(os.fspath(path)), options), None)


def open_bound_split_model(
    engine: LoadedEngine, table: ExpertTable, split: EngineSplit, binding: SplitBinding
) -> LlamaModel:
    """Load the model of the whole `table` with its slices of experts in the tiers of `binding`, whose end it closes.

    Raises:
        EngineError: the engine refused the model; the binding is still open then.
    """
    own = binding.devices
    options = _split_options(table.path, own, split.shares)
    view = loader_view(table)
    files = (abi.File * len(table.files))(
        *(abi.File(os.fsencode(file.path), **dataclasses.asdict(file.identity)) for file in table.files)
    )
    extents = (abi.Extent * len(view.extents))(
        *(abi.Extent(**dataclasses.asdict(extent)) for extent in view.extents)
    )
    options.experts_type = binding.buffer_type(split.names, split.splits)
    options.experts_regex = experts_regex(table).encode()
    options.files, options.n_files = files, len(files)
    options.extents, options.n_extents = extents, len(extents)
    options.header = view.header
    binding.begin_load()
    try:
        handle = _open(engine, table.path, options, binding)
    finally:
        binding.end_load()
    return LlamaModel(engine, handle, binding)


def _cut(split: abi.Split, n_devices: int) -> TensorCut:
    segments = [
        (split.repeats[number], split.ne[number * n_devices : (number + 1) * n_devices])
        for number in range(split.n_segments)
    ]
    return TensorCut.of_segments(split.axis, segments)


def _device(engine: LoadedEngine, name: str) -> int:
    find = engine.symbol("ggml_backend_dev_by_name", ct.c_void_p, ct.c_char_p)
    address: int | None = find(name.encode())
    if not address:
        known = ", ".join(device["name"] for device in engine.devices())
        raise DeviceError(f"asked for device {name!r}: this engine has {known}; its build decides which")
    return address


def _split_options(
    path: Path, devices: ct.Array[ct.c_void_p], shares: Sequence[float] | None
) -> abi.ModelOptions:
    if shares is not None and len(shares) != len(devices):
        raise ConfigError(
            f"--tensor-split has {len(shares)} shares for {len(devices)} devices: give one a device"
        )
    return abi.ModelOptions(
        abi=abi.HOST_ABI,
        path=os.fsencode(path),
        is_mapped=1,
        split_devices=devices,
        n_split_devices=len(devices),
        tensor_split=None if shares is None else (ct.c_float * len(shares))(*shares),
    )


def _open(
    engine: LoadedEngine, path: Path, options: abi.ModelOptions, binding: SplitBinding | None = None
) -> int:
    error = ct.create_string_buffer(_ERROR_BYTES)
    handle: int | None = engine.host.expertier_model_open(ct.byref(options), error, len(error))
    if not handle:
        ours = binding.take_error()[0] if binding is not None else ""
        reason = (ours + "\n" if ours else "") + error.value.decode(errors="replace").strip()
        raise EngineError(f"llama.cpp could not load {path} with --split-mode tensor:\n{reason}")
    return handle
