"""Counts the tokens of a text for a model that is not loaded: only its vocabulary and other metadata are read."""

from __future__ import annotations

import ctypes as ct
import os

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.interrupts import interrupts_deferred


def count_tokens(engine: LoadedEngine, path: str | os.PathLike[str], text: str) -> int | None:
    """Return the number of tokens of `text`, special tokens included; None where the engine cannot count them.

    Where the engine cannot count tokens, it says why when it loads the model.
    """
    options = abi.ModelOptions(abi=abi.HOST_ABI, path=os.fsencode(path), is_mapped=1, is_measured=1)
    error = ct.create_string_buffer(1)
    data = text.encode()
    tokens = (ct.c_int32 * (len(data) + 16))()
    with interrupts_deferred():
        handle = engine.host.expertier_model_open(ct.byref(options), error, len(error))
        if not handle:
            return None
        try:
            n = engine.host.expertier_model_tokenize(handle, data, len(data), tokens, len(tokens))
        finally:
            engine.host.expertier_model_close(handle)
    return int(n) if n >= 0 else None
