"""Models of the real llama-cpp-python, stock and through tiers, and what is compared of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from expertier.engine_adapter.hosts.llama_cpp_python import Llama
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB

COMMON = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
TEXT = "some words to go on from"


def budget(path: Path, n_slots: int) -> float:
    """Return the MiB that give every layer exactly `n_slots` slots."""
    return sum(demand.bytes_for(n_slots) for demand in ExpertTable.from_gguf(path).layer_demands()) / MIB


def ours(path: Path, n_slots: int, **arguments: Any) -> Any:
    """Open the model through tiers with `n_slots` slots a layer."""
    llama = Llama(str(path), expert_cache_mib=budget(path, n_slots), **{**COMMON, **arguments})
    assert set(llama.tiers.slots) == {n_slots}
    return llama


@contextmanager
def without_repacking() -> Iterator[None]:
    """Have stock models that are opened inside keep their weights as the file has them, as tiers do."""
    real = llama_cpp.llama_cpp.llama_model_default_params

    def defaults() -> Any:
        params = real()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = defaults
    try:
        yield
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = real


def stock(path: Path, **arguments: Any) -> Any:
    """Open the model with the class that ours takes the place of."""
    with without_repacking():
        return llama_cpp.Llama(str(path), **{**COMMON, **arguments})


def last_logits(llama: Any, n_rows: int) -> bytes:
    """The engine's own logits of the last batch."""
    return np.ctypeslib.as_array(llama._ctx.get_logits(), (n_rows, llama.n_vocab())).tobytes()


def all_logits(llama: Any, prompt: list[int], n_tokens: int) -> bytes:
    """Logits of a prompt and of `n_tokens` that follow greedily; of a Llama with `logits_all`."""
    llama.reset()
    llama.eval(prompt)
    low_level = last_logits(llama, len(prompt) % llama.n_batch or llama.n_batch)
    for _ in range(n_tokens):
        llama.eval([int(np.argmax(llama.scores[llama.n_tokens - 1]))])
        low_level += last_logits(llama, 1)
    assert llama.n_tokens == len(prompt) + n_tokens
    return llama.scores[: llama.n_tokens].tobytes() + low_level
