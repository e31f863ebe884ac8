"""A model that llama.cpp has loaded: with its experts in our tiers, or as stock would."""

from __future__ import annotations

import ctypes as ct
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from expertier.engine_adapter import proxy_abi as abi
from expertier.engine_adapter.llama_cpp.context import LlamaContext
from expertier.engine_adapter.llama_cpp.engine import LoadedEngine
from expertier.engine_adapter.llama_cpp.tier_binding import TierBinding
from expertier.errors import BusyError, EngineError
from expertier.tiers.manager import TierManager
from expertier.tiers.table import ExpertTable

_ERROR_BYTES = 1 << 14


@dataclass(frozen=True)
class LoadCounts:
    """Bytes that loading read from the file, those of them that were experts, and expert bytes skipped."""

    bytes_read: int
    expert_bytes: int
    bytes_skipped: int


class LlamaModel:
    """A loaded model. Close its contexts first, then it, then its tiers."""

    def __init__(self, engine: LoadedEngine, handle: int, binding: TierBinding | None) -> None:
        self._engine = engine
        self._handle: int | None = handle
        self._binding = binding
        self._open_contexts = 0

    @classmethod
    def open(
        cls,
        engine: LoadedEngine,
        path: str | os.PathLike[str],
        *,
        tiers: TierManager | None = None,
        repack: bool | None = None,
        inner_device: str = "CPU",
    ) -> LlamaModel:
        """Load `path`; with `tiers`, its experts are never read here but served by them.

        `repack` lets the engine rewrite weights for its own kernels: by default as stock does, and never with
        tiers, whose slots hold the file's bytes (parity is stated against stock without repacking, D10).

        Raises:
            EngineError: the engine refused the model; the message holds its own last lines.
        """
        binding = TierBinding(engine, tiers, inner_device) if tiers is not None else None
        options = abi.ModelOptions(
            abi=abi.HOST_ABI,
            path=os.fsencode(path),
            repack=int(repack if repack is not None else binding is None),
        )
        skip = None
        if tiers is not None and binding is not None:
            skip = np.ascontiguousarray(tiers.table.expert_ranges, np.int64)
            options.device = binding.device
            options.experts_type = binding.buffer_type
            options.experts_regex = experts_regex(tiers.table).encode()
            options.skip = skip.ctypes.data_as(ct.POINTER(ct.c_int64))
            options.n_skip = len(skip)
            options.repack = 0
        error = ct.create_string_buffer(_ERROR_BYTES)
        try:
            if binding is not None:
                binding.begin_load()
            try:
                handle = engine.host.expertier_model_open(ct.byref(options), error, len(error))
            finally:
                if binding is not None:
                    binding.end_load()
            if not handle:
                ours = binding.take_error()[0] if binding is not None else ""
                reason = (ours + "\n" if ours else "") + error.value.decode(errors="replace").strip()
                raise EngineError(f"llama.cpp could not load {Path(os.fspath(path))}:\n{reason}")
        except BaseException:
            if binding is not None:
                binding.close()
            raise
        return cls(engine, handle, binding)

    @property
    def binding(self) -> TierBinding | None:
        """The tiers' binding to the proxy; None for the stock engine."""
        return self._binding

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary: the length of a logits row."""
        return int(self._engine.host.expertier_model_n_vocab(self._handle))

    @property
    def n_ctx_train(self) -> int:
        """The context length, in tokens, that the model was trained with."""
        return int(self._engine.host.expertier_model_n_ctx_train(self._handle))

    def load_counts(self) -> LoadCounts:
        """Return what loading read; all zero for the stock engine, whose own loader we do not see into."""
        counts = abi.LoadCounts()
        self._engine.host.expertier_model_load_counts(self._handle, ct.byref(counts))
        return LoadCounts(counts.bytes_read, counts.expert_bytes, counts.bytes_skipped)

    def context(
        self,
        *,
        n_ctx: int = 4096,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int = 0,
        n_seq_max: int = 1,
        flash_attention: str = "auto",
    ) -> LlamaContext:
        """Open a context of `n_ctx` tokens; 0 threads means one for each processor this process may use.

        `flash_attention` is `auto`, `on` or `off`.

        Raises:
            EngineError: the engine refused it, with its own words.
        """
        context = LlamaContext(
            self._engine,
            self,
            abi.ContextOptions(
                abi=abi.HOST_ABI,
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=min(n_ubatch, n_batch),
                n_seq_max=n_seq_max,
                n_threads=n_threads or len(os.sched_getaffinity(0)),
                flash_attention={"auto": -1, "off": 0, "on": 1}[flash_attention],
            ),
        )
        self._open_contexts += 1
        return context

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of `text`, special ones included."""
        data = text.encode()
        tokens = (ct.c_int32 * (len(data) + 16))()
        n = self._engine.host.expertier_model_tokenize(self._handle, data, len(data), tokens, len(tokens))
        if n < 0:
            raise EngineError(
                f"the engine could not tokenise a text of {len(data)} bytes: it asked for {-n} tokens"
            )
        return list(tokens[:n])

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` stands for; they may end inside a character."""
        out = ct.create_string_buffer(256)
        n = self._engine.host.expertier_model_piece(self._handle, token, out, len(out))
        if n < 0:
            out = ct.create_string_buffer(-n)
            n = self._engine.host.expertier_model_piece(self._handle, token, out, len(out))
        return out.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        """Return whether `token` ends a generation."""
        return bool(self._engine.host.expertier_model_is_end(self._handle, token))

    def close(self) -> None:
        """Free the model; a second call does nothing.

        Raises:
            BusyError: contexts of it are still open.
        """
        if self._handle is None:
            return
        if self._open_contexts:
            raise BusyError(f"the model has {self._open_contexts} open context(s); close them first")
        self._engine.host.expertier_model_close(self._handle)
        self._handle = None
        if self._binding is not None:
            self._binding.close()

    def _context_closed(self) -> None:
        self._open_contexts -= 1

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def experts_regex(table: ExpertTable) -> str:
    """Return the override pattern that matches exactly the table's expert tensors, by their names' forms."""
    forms = sorted(
        {
            re.sub(r"^blk\\\.\d+\\\.", r"blk\\.[0-9]+\\.", re.escape(matrix.name))
            for layer in table.layers
            for matrix in layer.matrices
        }
    )
    return "^(" + "|".join(forms) + ")$"
