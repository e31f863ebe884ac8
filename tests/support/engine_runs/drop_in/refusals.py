"""What the drop-in refuses, in our own words."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp

from engine_runs.drop_in.models import COMMON, TEXT, ours
from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter.hosts.llama_cpp_python import Llama
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.errors import BudgetError, EngineMismatchError, NotMoeError
from model_files.gguf_files import write_model as write_raw_model


def errors(folder: Path) -> dict[str, bool]:
    """What is refused with the real package is refused in our own words."""
    path = write_small_model(folder, "Q4_K+Q6_K")

    def says(kind: type[Exception], words: str, **arguments: Any) -> bool:
        try:
            Llama(**{"model_path": str(path), **COMMON, **arguments}).close()
        except kind as error:
            return words in str(error)
        return False

    dense = folder / "dense.gguf"
    with suppress(NotMoeError):
        write_raw_model(dense, [None, None])
    found = {
        "budget": says(BudgetError, "at least", expert_cache_mib=0.01),
        "dense": says(NotMoeError, "dense", model_path=str(dense)),
    }
    unusable = write_raw_model(folder / "unusable.gguf", architecture="qwen3moe").path
    found["the engine's refusal"] = says(Exception, "could not load", model_path=str(unusable))
    params = llama_cpp.llama_cpp.llama_model_params

    class Longer(params):  # type: ignore[misc, valid-type]
        _fields_ = [("more", llama_cpp.ctypes.c_int64)]  # noqa: RUF012

    real = llama_cpp.llama_cpp.llama_model_default_params
    llama_cpp.llama_cpp.llama_model_default_params = lambda: Longer.from_buffer_copy(
        bytes(real()) + b"\0" * 8
    )
    found["another layout"] = says(EngineMismatchError, "more: not recorded")
    llama_cpp.llama_cpp.llama_model_default_params = real
    try:
        LoadedEngine.load((folder / "libother.so",), folder / "proxy.so", folder / "host.so")
        found["another engine"] = False
    except EngineMismatchError as error:
        found["another engine"] = "already runs the engine" in str(error)
    llama = ours(path, 2)
    found["fine afterwards"] = bool(llama.create_completion(TEXT, max_tokens=4)["choices"])
    llama.close()
    return found
