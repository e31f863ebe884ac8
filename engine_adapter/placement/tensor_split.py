"""Asks llama.cpp how it splits a model's experts among devices (`--split-mode tensor`).

The engine's own rule says which shard of a tensor a device gets. The engine is asked once, before any memory is taken,
with nothing but the model's metadata loaded; the experts' buffer type then tells ggml the same shards.
"""

from __future__ import annotations

import ctypes as ct
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.errors import EngineError, EngineMismatchError
from expertier.interrupts import interrupts_deferred
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.split.tensor_cut import TensorCut

_ERROR_BYTES = 1 << 14
_MIRRORED = 10  # GGML_BACKEND_SPLIT_AXIS_MIRRORED
_NOT_LOADED = -1  # EXPERTIER_NOT_LOADED in split_abi.h
_BLOCK = re.compile(r"^blk\.\d+\.")


@dataclass(frozen=True)
class TensorSplit:
    """How the engine splits expert tensors among devices.

    `names[i]` is split as `splits[i]`; `shares` are the devices' shares as `--tensor-split` gives them, or None
    for equal shares.
    """

    n_devices: int
    shares: tuple[float, ...] | None
    names: tuple[str, ...]
    splits: tuple[abi.Split, ...]

    def cuts(self) -> dict[str, TensorCut]:
        """Return each tensor's cut by name; a tensor that the engine does not load is cut as in another layer."""
        found = {
            name: self._cut(split)
            for name, split in zip(self.names, self.splits, strict=True)
            if split.axis != _NOT_LOADED
        }
        like = {_BLOCK.sub("", name): cut for name, cut in found.items()}
        unused = TensorCut.mirrored(self.n_devices)
        return {name: found.get(name) or like.get(_BLOCK.sub("", name), unused) for name in self.names}

    def share_array(self) -> Any:
        """Return the shares for the engine; None for equal shares."""
        return None if self.shares is None else (ct.c_float * self.n_devices)(*self.shares)

    def buffer_type(self, proxy: ct.CDLL, bindings: Sequence[int]) -> int:
        """Return the address of a ggml buffer type that splits tensors like this among the tiers at `bindings`.

        Raises:
            EngineError: this engine has no such buffer type.
        """
        n = len(self.names)
        error = ct.create_string_buffer(_ERROR_BYTES)
        address: int | None = proxy.expertier_split_buffer_type(
            (ct.c_void_p * len(bindings))(*bindings),
            len(bindings),
            (ct.c_char_p * n)(*(name.encode() for name in self.names)),
            (abi.Split * n)(*self.splits),
            n,
            error,
            len(error),
        )
        if not address:
            raise EngineError(f"this engine cannot split experts among devices: {error.value.decode()}")
        return address

    def _cut(self, split: abi.Split) -> TensorCut:
        n = self.n_devices
        if split.axis == _MIRRORED:
            return TensorCut.mirrored(n)
        segments = [
            (split.repeats[number], split.ne[number * n : (number + 1) * n])
            for number in range(split.n_segments)
        ]
        return TensorCut.of_segments(split.axis, segments)


def ask_tensor_split(
    engine: LoadedEngine, table: ExpertTable, devices: Sequence[str], shares: Sequence[float] | None = None
) -> TensorSplit:
    """Ask the engine how it would split the model's experts among its devices of these names.

    Only metadata is loaded. Raises:
        EngineError: the engine has no such device, or cannot split this architecture; the message quotes the engine.
        EngineMismatchError: this build hides the function that answers.
    """
    options = abi.ModelOptions(
        abi=abi.HOST_ABI,
        path=os.fsencode(table.path),
        is_mapped=1,
        device_names=",".join(devices).encode(),
        splits_tensors=1,
        tensor_split=None if shares is None else (ct.c_float * len(shares))(*shares),
        is_measured=1,
    )
    tensors = [
        (matrix.name, abi.FullTensor(matrix.name.encode(), matrix.ggml_type, (matrix.ne0, matrix.ne1, n, 1)))
        for layer in table.layers
        for n, matrices in [(layer.n_experts, layer.matrices)]
        for matrix in matrices
    ]
    asked = (abi.FullTensor * len(tensors))(*(tensor for _, tensor in tensors))
    splits = (abi.Split * len(tensors))()
    error = ct.create_string_buffer(_ERROR_BYTES)
    with interrupts_deferred():
        handle: int | None = engine.host.expertier_model_open(ct.byref(options), error, len(error))
        if not handle:
            raise EngineError(
                f"llama.cpp cannot split {table.path} among {', '.join(devices)} with --split-mode tensor:\n"
                f"{error.value.decode(errors='replace').strip()}"
            )
        try:
            told = engine.host.expertier_model_splits(handle, len(devices), asked, len(tensors), splits)
        finally:
            engine.host.expertier_model_close(handle)
    if told < 0:
        raise EngineError(f"no memory to ask how {len(tensors)} tensors are split: free some")
    if not told:
        raise EngineMismatchError(
            f"{engine.library_paths[-1]} does not say how it splits tensors among {len(devices)} devices: it hides "
            "llama_meta_device_get_split_state or llama_model::get_tensor. Use --split-mode layer, the wheel, or a "
            "build of llama.cpp without hidden symbols"
        )
    return TensorSplit(
        len(devices),
        None if shares is None else tuple(shares),
        tuple(name for name, _ in tensors),
        tuple(splits),
    )
