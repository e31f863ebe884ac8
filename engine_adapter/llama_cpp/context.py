"""A context of a loaded model: it runs batches and holds their key-value cache and logits."""

from __future__ import annotations

import ctypes as ct
import re
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter import proxy_abi as abi
from expertier.engine_adapter.llama_cpp.engine import LoadedEngine
from expertier.errors import DecodeError, EngineError

if TYPE_CHECKING:
    from expertier.engine_adapter.llama_cpp.model import LlamaModel

_ERROR_BYTES = 1 << 14

_STATUS = {
    1: "no room in the key-value cache",
    2: "aborted",
    -1: "an invalid batch",
    -2: "out of memory",
    -3: "a failed computation",
}


class LlamaContext:
    """One context. Not for several threads at once; several contexts of a model are."""

    def __init__(self, engine: LoadedEngine, model: LlamaModel, options: abi.ContextOptions) -> None:
        self._engine = engine
        self._model = model
        self._options = options
        engine.take_log(0)
        error = ct.create_string_buffer(_ERROR_BYTES)
        self._handle: int | None = engine.host.expertier_context_open(
            model._handle, ct.byref(options), error, len(error)
        )
        if not self._handle:
            raise EngineError(
                f"llama.cpp refused a context of {options.n_ctx} tokens:\n{error.value.decode(errors='replace')}"
            )
        self._engine.host.expertier_context_set_sampler(self._handle, 0.0, 0)
        log = engine.take_log(0)
        splits = re.findall(r"splits = (\d+)", log)
        self.n_graph_splits: int | None = int(splits[-1]) if splits else None
        """Splits of the engine's own scheduler, as it logged them; None when it did not."""
        self.flash_attention_enabled = "Flash Attention enabled" in log or options.flash_attention == 1
        """Whether flash attention is on: as asked for, or as `auto` decided."""

    @property
    def n_ctx(self) -> int:
        """Tokens that fit in the key-value cache: what was asked for, rounded up by the engine."""
        return int(self._engine.host.expertier_context_n_ctx(self._handle))

    @property
    def n_batch(self) -> int:
        """Most tokens of one `decode`."""
        return int(self._options.n_batch)

    def decode(
        self, tokens: Sequence[int], position: int, *, sequence: int = 0, all_logits: bool = False
    ) -> None:
        """Run `tokens` (1 to n_batch of them) of `sequence` from `position` on.

        Logits are kept for the last token, or for all of them.

        Raises:
            DecodeError: the engine returned an error status. The cause is the error that made it fail, such as a
                SourceError when expert bytes could not be read. The next decode works.
        """
        if not 1 <= len(tokens) <= self.n_batch:
            raise DecodeError(
                f"a batch of {len(tokens)} tokens was asked for; this context takes 1 to {self.n_batch} at once"
            )
        array = (ct.c_int32 * len(tokens))(*tokens)
        status = self._engine.host.expertier_context_decode(
            self._handle, array, len(tokens), position, sequence, int(all_logits)
        )
        if status == 0:
            return
        message, cause = "", None
        if self._model.binding is not None:
            message, cause = self._model.binding.take_error()
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        reason = message or self._engine.take_log().strip()
        raise DecodeError(
            f"llama.cpp returned status {status} ({_STATUS.get(status, 'unknown')}) for {len(tokens)} tokens at "
            f"position {position}" + (f": {reason}" if reason else "") + (f": {cause}" if cause else "")
        ) from cause

    def logits(self, index: int = -1) -> npt.NDArray[np.float32]:
        """Return a copy of the logits of token `index` of the last batch, float32 of shape [n_vocab]."""
        pointer = self._engine.host.expertier_context_logits(self._handle, index)
        if not pointer:
            raise EngineError(f"no logits were kept for token {index} of the last batch")
        return np.ctypeslib.as_array(pointer, (self._model.n_vocab,)).copy()

    def set_sampler(self, temperature: float = 0.0, seed: int = 0) -> None:
        """Choose how `sample` picks: greedily at temperature 0, else at random from the likely tokens."""
        self._engine.host.expertier_context_set_sampler(self._handle, temperature, seed)

    def sample(self) -> int:
        """Return the next token after the last batch."""
        return int(self._engine.host.expertier_context_sample(self._handle))

    def forget(self, sequence: int = 0, position: int = 0) -> None:
        """Drop what the cache holds of `sequence` from `position` on."""
        self._engine.host.expertier_context_forget(self._handle, sequence, position)

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        if self._handle is not None:
            self._engine.host.expertier_context_close(self._handle)
            self._handle = None
            self._model._context_closed()

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
