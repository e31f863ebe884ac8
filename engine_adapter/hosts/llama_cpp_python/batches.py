"""Watches a context's batches: a batch that was computed without its experts raises, and is removed from the cache."""

from __future__ import annotations

from typing import Any

from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.errors import DecodeError
from expertier.interrupts import interrupts_deferred

_NOT_BEGUN = (1, -1)  # llama_decode: no room in the cache; an invalid batch


class WatchedBatches:
    """Replaces `LlamaContext.decode` of one context of llama-cpp-python.

    It holds the context's address instead of the object, because the object holds it: without a cycle, `del llama`
    frees both at once.
    """

    def __init__(self, llama_h: Any, context: Any, binding: BindingSet) -> None:
        self._llama = llama_h
        self._context = context
        self._memory = llama_h.llama_get_memory(context)
        self._binding = binding
        self._lost: set[int] = set()

    def decode(self, batch: Any) -> None:
        """Run a batch; Ctrl-C is raised after it.

        Raises:
            DecodeError: expert bytes could not be read (the cause is the SourceError), or the engine asked for them
                in a way that tiers cannot serve. The cache holds nothing of the batch, and the next batch works.
                Where the cache cannot drop the end of a sequence, as with recurrent layers, it holds nothing of the
                sequence, and the next batch has to begin at position 0: call `Llama.reset()`.
            RuntimeError: any other status, as without tiers.
            BusyError: this thread holds leases of the tiers, which the engine would wait for.
        """
        self._binding.tiers.require_no_leases_here("run the engine")
        self._binding.take_error()  # drops an error of an earlier batch
        begins = _first_positions(batch.batch)
        self._require_not_lost(begins)
        with interrupts_deferred():
            status = self._llama.llama_decode(self._context, batch.batch)
            self._llama.llama_synchronize(self._context)
            message, cause = self._binding.take_error()
            failed = status != 0 or bool(message)
            if failed and status not in _NOT_BEGUN:
                self._discard(begins)
        if not failed:
            self._lost.difference_update(begins)
            return
        if not message and cause is None:
            raise RuntimeError(f"llama_decode returned {status}")  # the message of llama-cpp-python itself
        raise DecodeError(
            f"llama_decode returned {status} for a batch of {batch.batch.n_tokens} tokens"
            + (f": {message}" if message else "")
            + (f": {cause}" if cause else "")
        ) from cause

    def _require_not_lost(self, begins: dict[int, int]) -> None:
        for sequence in self._lost & begins.keys():
            begin = begins[sequence]
            # A state that was loaded meanwhile ends where this batch begins.
            if begin > 0 and self._llama.llama_memory_seq_pos_max(self._memory, sequence) != begin - 1:
                raise DecodeError(
                    f"a batch from position {begin} on was asked for, but a failed batch has removed this sequence "
                    "from the cache: call reset() and start anew"
                )

    def _discard(self, begins: dict[int, int]) -> None:
        """Remove the batch from the cache; where that is not possible, remove all of each sequence in it."""
        if self._memory is None:
            return
        for sequence, begin in begins.items():
            if not self._llama.llama_memory_seq_rm(self._memory, sequence, begin, -1):
                self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
                if begin > 0:
                    self._lost.add(sequence)


def _first_positions(batch: Any) -> dict[int, int]:
    """Return the first position of each sequence of the batch."""
    begins: dict[int, int] = {}
    for i in range(batch.n_tokens):
        position = int(batch.pos[i])
        for j in range(batch.n_seq_id[i]):
            sequence = int(batch.seq_id[i][j])
            begins[sequence] = min(position, begins.get(sequence, position))
    return begins
