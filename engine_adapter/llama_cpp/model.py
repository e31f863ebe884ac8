"""A model that llama.cpp has loaded, with its experts in our tiers or as the stock engine loads it."""

from __future__ import annotations

import ctypes as ct
import dataclasses
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.engine_adapter.binding.binding_set import BindingSet, bind
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.engine_adapter.llama_cpp.context import LlamaContext
from expertier.engine_adapter.llama_cpp.load_watch import LoadWatch
from expertier.engine_adapter.llama_cpp.loader_view import loader_view
from expertier.engine_adapter.opening import (
    close_abandoned,
    close_after,
    closed_if_interrupted,
    closed_when_dropped,
)
from expertier.engine_adapter.placement.override_pattern import placed_regex
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import BusyError, ConfigError, EngineError
from expertier.interrupts import interrupts_deferred, not_interrupted_at_entry
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet

_ERROR_BYTES = 1 << 14
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class LoadCounts:
    """Bytes that loading read from the file, and how many of these were bytes of experts."""

    bytes_read: int
    expert_bytes: int


class LlamaModel:
    """A loaded model. Close its contexts first, then the model, then its tiers."""

    def __init__(self, engine: LoadedEngine, handle: int, binding: BindingSet | None) -> None:
        self._engine = engine
        self._handle: int | None = handle
        self._binding = binding
        self._open_contexts = 0
        self._contexts_lock = threading.Lock()

    @classmethod
    @closed_if_interrupted
    def open(
        cls,
        engine: LoadedEngine,
        path: str | os.PathLike[str],
        *,
        tiers: TierSet | None = None,
        repack: bool | None = None,
        inner_device: str | None = None,
        placement: Placement | None = None,
        experts_in_ram: bool = False,
        mapped: bool = True,
        split_tensors: bool = False,
        params: ct.Structure | None = None,
        lookups: LookupLog | None = None,
    ) -> LlamaModel:
        """Load `path`; with `tiers`, loading reads no experts, as the tiers serve them.

        `inner_device` is the engine's name of the device that computes all layers, such as `CUDA0` or `CPU`; by
        default the engine places stock models by itself, and tiers are bound to the CPU. For a stock model it may name
        several devices, `CUDA0,CUDA1`, over which the engine splits the layers. Tiers on several devices come with the
        `placement` that they were made for. Two options of the stock
        engine: `experts_in_ram` keeps the experts in RAM (llama.cpp's `--cpu-moe`), where they are computed by the
        CPU, or served through `context(moe_cache_bytes=...)`; with `mapped` False the file is read instead of mapped,
        and weights in RAM are in memory that the device can copy from at full speed.

        With `split_tensors` the devices of a stock model share every tensor (`--split-mode tensor`) and not the layers.

        `repack` lets the engine rewrite weights for its own kernels: by default as stock does, and never with
        tiers, whose slots hold the file's bytes (parity is stated against stock without repacking, D10). `params` is
        the llama_model_params of a program that binds the engine by itself: tiers override only the fields that they
        decide. `lookups` logs which experts the engine asks the tiers for.

        An interrupt ends the load between two tensors: it is raised once everything that was opened is closed again.

        Raises:
            EngineError: the engine refused the model, and the message holds the last lines of the engine's log; or the
                engine has no such device; or `path` is not the file of the tiers.
            ConfigError: an option of the stock engine was given beside `tiers`.
        """
        if tiers is not None:
            if experts_in_ram or not mapped:
                raise ConfigError(
                    "experts_in_ram and mapped=False were asked for together with tiers, which place the experts and "
                    "load the file themselves: leave these options out, or the tiers"
                )
            _require_file_of(tiers.table, Path(os.fspath(path)))
        options = abi.ModelOptions(
            abi=abi.HOST_ABI,
            path=os.fsencode(path),
            repack=int(repack if repack is not None else tiers is None),
            device_names=inner_device.encode() if inner_device is not None and tiers is None else None,
            experts_in_ram=int(experts_in_ram),
            is_mapped=int(mapped),
            splits_tensors=int(split_tensors),
            params=ct.addressof(params) if params is not None else None,
            params_bytes=ct.sizeof(params) if params is not None else 0,
        )
        watch = LoadWatch()
        options.goes_on = watch.goes_on
        error = ct.create_string_buffer(_ERROR_BYTES)
        placement = placement if placement is not None else Placement.on_one(inner_device or "CPU")
        binding = bind(engine, tiers, placement, lookups) if tiers is not None else None
        try:
            if tiers is None or binding is None:
                handle = engine.host.expertier_model_open(ct.byref(options), error, len(error))
            else:
                view = loader_view(tiers.table)
                files = (abi.File * len(tiers.table.files))(
                    *(
                        abi.File(os.fsencode(file.path), **dataclasses.asdict(file.identity))
                        for file in tiers.table.files
                    )
                )
                extents = (abi.Extent * len(view.extents))(
                    *(abi.Extent(**dataclasses.asdict(extent)) for extent in view.extents)
                )
                tensors = placement.tensors
                types = [each.buffer_type for each in binding.bindings]
                if tensors is not None:
                    addresses = [each.address for each in binding.bindings]
                    types = [tensors.buffer_type(engine.proxy, addresses)] * len(addresses)
                    options.splits_tensors, options.tensor_split = 1, tensors.share_array()
                placed = (abi.Placed * len(binding.bindings))(
                    *(
                        abi.Placed(
                            each.device,
                            type_of_experts,
                            placed_regex(
                                each.manager.table, is_split=placement.is_split and tensors is None
                            ).encode(),
                            units,
                        )
                        for each, type_of_experts, units in zip(
                            binding.bindings, types, placement.units, strict=True
                        )
                    )
                )
                options.placed, options.n_placed = placed, len(placed)
                options.files, options.n_files = files, len(files)
                options.extents, options.n_extents = extents, len(extents)
                options.header = view.header
                options.repack = 0
                binding.begin_load()
                try:
                    handle = engine.host.expertier_model_open(ct.byref(options), error, len(error))
                finally:
                    binding.end_load()
            if not handle:
                watch.raise_interrupt()
                ours = binding.take_error()[0] if binding is not None else ""
                reason = (ours + "\n" if ours else "") + error.value.decode(errors="replace").strip()
                raise EngineError(f"llama.cpp could not load {Path(os.fspath(path))}:\n{reason}")
            if binding is not None and placement.is_split and (tensor := binding.find_unplaced()):
                engine.host.expertier_model_close(handle)
                raise EngineError(
                    f"llama.cpp placed {tensor} on another device than the one whose tiers hold it, of "
                    f"{placement.device_name} with {placement.units} layers: leave out what places tensors elsewhere"
                )
        except BaseException:
            if binding is not None:
                binding.close()
            raise
        return cls(engine, handle, binding)

    @property
    def binding(self) -> BindingSet | None:
        """The tiers' binding to the proxy; None for the stock engine."""
        return self._binding

    @property
    def handle(self) -> int:
        """Address of the host library's model, for its contexts."""
        if self._handle is None:
            raise EngineError("the model was used after it was closed; open it again")
        return self._handle

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary: the length of a logits row."""
        return int(self._engine.host.expertier_model_n_vocab(self.handle))

    @property
    def n_ctx_train(self) -> int:
        """The context length, in tokens, that the model was trained with."""
        return int(self._engine.host.expertier_model_n_ctx_train(self.handle))

    def load_counts(self) -> LoadCounts:
        """Return what loading read; all zero for the stock engine, whose own loader does not count its reads."""
        counts = abi.LoadCounts()
        self._engine.host.expertier_model_load_counts(self.handle, ct.byref(counts))
        return LoadCounts(counts.bytes_read, counts.expert_bytes)

    def hand_over(self) -> int:
        """Return the address of the engine's own model: the caller frees it from now on, before `close`."""
        return int(self._engine.host.expertier_model_hand_over(self.handle))

    @closed_if_interrupted
    def context(
        self,
        *,
        n_ctx: int = 4096,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int = 0,
        n_seq_max: int = 1,
        flash_attention: str = "auto",
        moe_cache_bytes: int = 0,
        tensors_path: str | os.PathLike[str] | None = None,
    ) -> LlamaContext:
        """Open a context of `n_ctx` tokens; 0 threads means one for each processor this process may use.

        `n_batch` is the most tokens of one `decode`, and `n_ubatch` the most of one graph. `flash_attention` is `auto`,
        `on` or
        `off`. `moe_cache_bytes` is device memory for llama.cpp's own cache of experts, for a model that was opened
        with `experts_in_ram`. `tensors_path` is a file for every float32 tensor that is computed
        (`llama_host/tensors.h`), to compare two runs: then the engine computes node by node, slowly and without
        fusing any.

        Raises:
            EngineError: the engine refused the context, and the message quotes it; or this release has no cache of
                experts. ConfigError: `flash_attention` has no such value, or a cache of the engine's own was asked
                for beside tiers.
        """
        if moe_cache_bytes < 0 or (moe_cache_bytes and self._binding is not None):
            raise ConfigError(
                f"moe_cache_bytes is {moe_cache_bytes}: give 0 or more, and 0 for a model with tiers, which are the "
                "cache of its experts"
            )
        if flash_attention not in _FLASH_ATTENTION:
            raise ConfigError(
                f"flash_attention is {flash_attention!r}: give one of {', '.join(_FLASH_ATTENTION)}"
            )
        options = abi.ContextOptions(
            abi=abi.HOST_ABI,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(n_ubatch, n_batch),
            n_seq_max=n_seq_max,
            n_threads=n_threads or len(os.sched_getaffinity(0)),
            flash_attention=_FLASH_ATTENTION[flash_attention],
            moe_cache_bytes=moe_cache_bytes,
            tensors_path=os.fsencode(tensors_path) if tensors_path is not None else None,
        )
        with self._contexts_lock:
            handle = self.handle
            self._open_contexts += (
                1  # counted before the context exists, so that `close` cannot free the model meanwhile
            )
        try:
            return LlamaContext(
                self._engine, handle, self.n_vocab, self._binding, options, self._context_closed
            )
        except BaseException:
            self._context_closed()
            raise

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of `text`, special ones included."""
        data = text.encode()
        tokens = (ct.c_int32 * (len(data) + 16))()
        n = self._engine.host.expertier_model_tokenize(self.handle, data, len(data), tokens, len(tokens))
        if n < 0:
            raise EngineError(
                f"the engine could not tokenise a text of {len(data)} bytes"
                + (f": it asked for {-n} tokens" if n != abi.TEXT_ERROR else "")
            )
        return list(tokens[:n])

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` stands for; they may end inside a character.

        Raises:
            EngineError: there is no such token.
        """
        out = ct.create_string_buffer(256)
        n = self._engine.host.expertier_model_piece(self.handle, token, out, len(out))
        if abi.TEXT_ERROR < n < 0:
            out = ct.create_string_buffer(-n)
            n = self._engine.host.expertier_model_piece(self.handle, token, out, len(out))
        if n < 0:
            raise EngineError(f"there is no token {token}: the vocabulary has {self.n_vocab}")
        return out.raw[:n]

    def is_end(self, token: int) -> bool:
        """Return whether `token` ends a generation."""
        return bool(self._engine.host.expertier_model_is_end(self.handle, token))

    def close(self) -> None:
        """Free the model; a second call does nothing.

        Raises:
            BusyError: contexts of the model are still open, or the tiers are still busy; call `close` again later.
        """
        close_abandoned()
        with interrupts_deferred(), self._contexts_lock:
            if self._open_contexts:
                raise BusyError(f"the model has {self._open_contexts} open context(s); close them first")
            handle, self._handle = self._handle, None
            if handle is not None:
                self._engine.host.expertier_model_close(handle)
            if self._binding is not None:
                self._binding.close()

    __del__ = closed_when_dropped

    def _context_closed(self) -> None:
        with self._contexts_lock:
            self._open_contexts -= 1

    @not_interrupted_at_entry
    def __enter__(self) -> LlamaModel:
        return self

    @not_interrupted_at_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)


def _require_file_of(table: ExpertTable, path: Path) -> None:
    """Refuse a path that names none of the table's files: that model would run with another model's experts."""
    try:
        found = FileIdentity.of(path.stat())
    except OSError as error:
        raise EngineError(f"llama.cpp could not load {path}: {error.strerror}") from error
    if found not in [file.identity for file in table.files]:
        raise EngineError(
            f"{path}: this is not the file that the tiers were made for, or it has changed; they serve {table.path}"
        )
