"""A context of a loaded model: it runs batches and holds their key-value cache and logits."""

from __future__ import annotations

import ctypes as ct
import re
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.engine_adapter.opening import close_after, closed_when_dropped
from expertier.errors import DecodeError, EngineError
from expertier.interrupts import interrupts_deferred, not_interrupted_at_entry

_ERROR_BYTES = 1 << 14

_STATUS = {
    1: "no room in the key-value cache",
    2: "aborted",
    -1: "an invalid batch",
    -2: "out of memory",
    -3: "a failed computation",
    -100: "the engine threw an exception, for want of memory most likely",
    -101: "a failed batch has removed this sequence from the cache: start it anew, at position 0",
}


class LlamaContext:
    """One context, for one thread at a time. Several contexts of a model may run at the same time."""

    _handle: int | None = None

    def __init__(
        self,
        engine: LoadedEngine,
        model: int,
        n_vocab: int,
        binding: BindingSet | None,
        options: abi.ContextOptions,
        on_close: Callable[[], None],
    ) -> None:
        """Open a context of the model at address `model`; for `LlamaModel.context`, which defers interrupts."""
        self._engine = engine
        self._n_vocab = n_vocab
        self._binding = binding
        self._on_close = on_close
        engine.take_log(0)
        error = ct.create_string_buffer(_ERROR_BYTES)
        self._handle = engine.host.expertier_context_open(model, ct.byref(options), error, len(error))
        if not self._handle:
            raise EngineError(
                f"llama.cpp refused a context of {options.n_ctx} tokens:\n"
                f"{error.value.decode(errors='replace').strip()}\nif memory was missing, ask for a shorter "
                "context (--ctx), or free some memory"
            )
        log = engine.take_log(0)
        splits = re.findall(r"splits = (\d+)", log)
        self.n_graph_splits: int | None = int(splits[-1]) if splits else None
        """Splits of the engine's own scheduler, as it logged them; None when it logged none."""
        told = (
            "Flash Attention enabled",
            "enabling flash_attn since",
        )  # with a tensor split, the engine turns it on without logging a decision
        self.flash_attention_enabled = any(words in log for words in told) or options.flash_attention == 1
        """Whether flash attention is on: as asked for, or as `auto` decided."""

    @property
    def n_ctx(self) -> int:
        """Tokens that fit in the key-value cache: the length that was asked for, rounded up by the engine."""
        return int(self._engine.host.expertier_context_n_ctx(self._open_handle()))

    @property
    def n_batch(self) -> int:
        """Most tokens of one `decode`: the number that was asked for, or the context's length if that is less."""
        return int(self._engine.host.expertier_context_n_batch(self._open_handle()))

    def decode(
        self, tokens: Sequence[int], position: int, *, sequence: int = 0, all_logits: bool = False
    ) -> None:
        """Run `tokens` (1 to n_batch of them) of `sequence` from `position` on.

        The engine saves logits for the last token, or for all tokens. A Ctrl-C ends the batch early and is raised
        afterwards.

        Raises:
            DecodeError: the engine returned an error status. The cause is the error that made it fail, such as a
                SourceError when expert bytes could not be read. The next decode works: a refused batch
                leaves the cache as it was, and after a failed batch the cache holds nothing of the sequence from
                `position` on. With recurrent layers it holds nothing of the sequence at all then, and decoding it
                from another position than 0 is refused.
            BusyError: this thread holds leases of the tiers that the engine would wait for.
        """
        handle, array = self._open_handle(), self._batch_of(tokens)

        def run() -> int:
            return int(
                self._engine.host.expertier_context_decode(
                    handle, array, len(tokens), position, sequence, int(all_logits)
                )
            )

        self._run(run, f"{len(tokens)} tokens at position {position}", sequence, position)

    def _batch_of(self, numbers: Sequence[int]) -> ct.Array[ct.c_int32]:
        if not 1 <= len(numbers) <= self.n_batch:
            raise DecodeError(
                f"a batch of {len(numbers)} tokens was asked for; this context takes 1 to {self.n_batch} at once"
            )
        return (ct.c_int32 * len(numbers))(*numbers)

    def _run(self, run: Callable[[], int], what: str, sequence: int, position: int) -> None:
        """Run a batch of `what`, which begins at `position` of `sequence`."""
        handle = self._open_handle()
        if self._binding is not None:
            self._binding.tiers.require_no_leases_here("run the engine")
            self._binding.take_error()  # drops an error of an earlier batch
        with interrupts_deferred(lambda: self._engine.host.expertier_context_abort(handle)):
            status = run()
            message, cause = self._binding.take_error() if self._binding is not None else ("", None)
            if status == 0 and message:  # the engine went on without the bytes of an expert
                self._engine.host.expertier_context_discard(handle, sequence, position)
        if status == 0 and not message:
            return
        reason = message or self._engine.take_log().strip()
        raise DecodeError(
            f"llama.cpp returned status {status} ({_STATUS.get(status, 'unknown')}) for {what}"
            + (f": {reason}" if reason else "")
            + (f": {cause}" if cause else "")
        ) from cause

    def logits(self, index: int = -1) -> npt.NDArray[np.float32]:
        """Return a copy of the logits of token `index` of the last batch, float32 of shape [n_vocab].

        Raises:
            EngineError: the engine saved no logits for it, or the last batch failed.
        """
        pointer = self._engine.host.expertier_context_logits(self._open_handle(), index)
        if not pointer:
            raise EngineError(
                f"there are no logits of token {index}: the last batch saved none for it, or failed"
            )
        return np.ctypeslib.as_array(pointer, (self._n_vocab,)).copy()

    def set_sampler(self, temperature: float = 0.0, seed: int = 0) -> None:
        """Choose how `sample` picks: greedily at temperature 0, otherwise at random among the likely tokens."""
        if not self._engine.host.expertier_context_set_sampler(self._open_handle(), temperature, seed):
            raise EngineError("no memory for a sampler")

    def sample(self) -> int:
        """Return the next token after the last batch.

        Raises:
            EngineError: no batch was decoded yet, or the last batch failed.
        """
        token = int(self._engine.host.expertier_context_sample(self._open_handle()))
        if token < 0:
            raise EngineError(
                "there are no logits to sample from: no batch was decoded yet, or the last batch failed"
            )
        return token

    def forget(self, sequence: int = 0, position: int = 0) -> None:
        """Drop what the cache holds of `sequence` from `position` on.

        Raises:
            EngineError: there is no such sequence; or the model has recurrent layers, which forget all of a sequence
                or nothing.
        """
        if not self._engine.host.expertier_context_forget(self._open_handle(), sequence, position):
            raise EngineError(
                f"the cache cannot forget sequence {sequence} from position {position} on: there is no such "
                "sequence, or the model has recurrent layers, which forget all of a sequence or nothing"
            )

    def close(self) -> None:
        """Free the context; a second call does nothing.

        Raises:
            EngineError: the file of tensors that it was opened with is incomplete. The context is freed.
        """
        with interrupts_deferred():
            handle, self._handle = self._handle, None
            if handle is not None:
                is_complete = self._engine.host.expertier_context_end_tensors(handle)
                self._engine.host.expertier_context_close(handle)
                self._on_close()
                if not is_complete:
                    raise EngineError("not all tensors could be written to the file: is the disk full?")

    __del__ = closed_when_dropped

    def _open_handle(self) -> int:
        if self._handle is None:
            raise EngineError("the context was used after it was closed; open another")
        return self._handle

    @not_interrupted_at_entry
    def __enter__(self) -> LlamaContext:
        return self

    @not_interrupted_at_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)
