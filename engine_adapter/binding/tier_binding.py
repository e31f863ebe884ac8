"""A tier manager bound to the proxy: the structs that C++ reads, and the callback that serves its misses."""

from __future__ import annotations

import ctypes as ct
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.abi.counters import ProxyCounters
from expertier.engine_adapter.binding.bound_structs import BoundStructs
from expertier.engine_adapter.binding.device_lookup import DeviceLookup, open_device_lookup
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.engine_adapter.binding.miss_costs import miss_costs
from expertier.engine_adapter.binding.slab_compute import ComputeCounts, SlabCompute, follows_demand
from expertier.engine_adapter.opening import closed_when_dropped
from expertier.errors import BusyError, EngineError
from expertier.interrupts import interrupts_deferred
from expertier.tiers.engine.prefill_stream import resolve_stream_tokens
from expertier.tiers.manager import TierManager

_log = logging.getLogger(__name__)

_ERROR_BYTES = 4096


class ProxyHolder(Protocol):
    """Anything that has our proxy library: an engine in this process, or a tool in whose process we run."""

    @property
    def proxy(self) -> ct.CDLL:
        """The library, with its functions declared."""


class TierBinding:
    """One model's tiers, bound to the proxy over one of the engine's devices until `close`."""

    _handle: int | None = None
    _device_lookup: DeviceLookup | None = None

    def __init__(
        self,
        engine: ProxyHolder,
        manager: TierManager,
        inner_device: str = "CPU",
        lookups: LookupLog | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Bind, until `close`; `layers` are the model's numbers of the manager's layers, where it does not have all.

        Raises:
            EngineError: the proxy cannot use the tiers on that device. BusyError: an engine is bound already.
        """
        self._engine = engine
        self._manager = manager
        self._lookups = lookups  # C++ keeps the address of its callback
        self._serves_all_loads = False
        self.on_fill: Callable[[BaseException | None], None] | None = None
        """Called after each fill with the exception that made it fail, or None. It runs on the engine's thread, so it
        must be quick."""
        self._fill_errors = threading.local()  # a fill runs on the thread whose batch needs it
        try:
            with interrupts_deferred():
                self._bind(inner_device, layers)
        except BaseException:
            self.close()  # needed where the binding succeeded and the end of the region raised
            raise

    def _bind(self, inner_device: str, layers: Sequence[int] | None) -> None:
        engine, manager, lookups = self._engine, self._manager, self._lookups
        config = manager.config
        described = manager.engine.bind()
        try:
            # The struct and all that it points to must outlive the binding: C++ keeps the pointers.
            self._fill = abi.FillCallback(self._serve_misses)
            self._load = abi.LoadCallback(self._serve_streamed)
            self._read = abi.ReadCallback(self._serve_read)
            self._structs = BoundStructs(described, self._fill, self._load, self._read, lookups, layers)
            self._structs.binding.stream_tokens = resolve_stream_tokens(config, manager.device)
            error = ct.create_string_buffer(_ERROR_BYTES)
            self._handle = engine.proxy.expertier_tiers_bind(
                ct.byref(self._structs.binding), inner_device.encode(), error, len(error)
            )
            if not self._handle:
                raise EngineError(
                    f"the tiers cannot be bound to device {inner_device}: {error.value.decode()}"
                )
            self._compute: SlabCompute | None = None
            follows = follows_demand(config.follow_demand, inner_device)
            if manager.engine.computes_in_slab or follows:
                self._compute = SlabCompute(
                    engine.proxy,
                    self._handle,
                    manager,
                    self._structs,
                    self._note_error,
                    self._miss_costs if follows else None,
                )
            self._device_lookup = open_device_lookup(
                engine.proxy,
                self._handle,
                inner_device,
                config.decode_gate,
                prefetch=config.decode_prefetch,
                capture=config.decode_capture,
                expert_bytes=max(layer.expert_bytes for layer in manager.table.layers),
            )
        except BaseException:
            handle, self._handle = self._handle, None
            if handle:
                engine.proxy.expertier_tiers_unbind(handle)
            manager.engine.unbind()
            raise

    def _miss_costs(self) -> list[float]:
        return miss_costs(self._manager.table.n_layers, self.counters())

    @property
    def device(self) -> int:
        """Address of the ggml device that the model's layers are placed on."""
        return int(self._engine.proxy.expertier_tiers_device(self._open_handle()))

    @property
    def buffer_type(self) -> int:
        """Address of the ggml buffer type that the expert tensors are placed in."""
        return int(self._engine.proxy.expertier_tiers_buffer_type(self._open_handle()))

    @property
    def manager(self) -> TierManager:
        """The tiers that are bound."""
        return self._manager

    @property
    def address(self) -> int:
        """The address of the binding in the proxy library."""
        return self._open_handle()

    @property
    def bindings(self) -> tuple[TierBinding, ...]:
        """The bindings of the single devices, which is this binding alone."""
        return (self,)

    def begin_load(self) -> None:
        """Have expert tensors that this thread's loads place in this buffer type belong to these tiers."""
        self._engine.proxy.expertier_tiers_begin_load(self._open_handle())

    def end_load(self) -> None:
        """End what `begin_load` began, of all tiers on this thread."""
        self._engine.proxy.expertier_tiers_end_load()

    def serve_all_loads(self) -> None:
        """Have expert tensors that the engine's own threads load belong to these tiers, until `close`."""
        self._engine.proxy.expertier_tiers_set_default(self._open_handle())
        self._serves_all_loads = True

    def serve_misses(self) -> None:
        """Have misses filled again, after `zero_fill_next_graph` or `refuse_misses`."""
        self._engine.proxy.expertier_tiers_set_fills(self._open_handle(), abi.FILLS_SERVED)

    def zero_fill_next_graph(self) -> None:
        """Have the misses of the next graph, whose output nobody reads, be zeros; graphs after it wait.

        For a call that runs a graph while it holds the interpreter's lock: a fill would wait for that lock forever.
        """
        self._engine.proxy.expertier_tiers_set_fills(self._open_handle(), abi.FILLS_ZEROS)

    def refuse_misses(self) -> None:
        """Have batches that miss fail instead of asking Python; returns once no fill is running."""
        self._engine.proxy.expertier_tiers_set_fills(self._open_handle(), abi.FILLS_REFUSED)

    @property
    def device_name(self) -> str:
        """Name of the device that layers are placed on, for the engine's own options."""
        return str(self._engine.proxy.expertier_tiers_device_name(self._open_handle()).decode())

    @property
    def buffer_type_name(self) -> str:
        """Name of the buffer type that experts are placed in, for the engine's own options."""
        return str(self._engine.proxy.expertier_tiers_buffer_name(self._open_handle()).decode())

    def find_unplaced(self) -> str:
        """Return the first expert tensor that the engine has not placed here though it should have; empty: none."""
        text = ct.create_string_buffer(_ERROR_BYTES)
        self._engine.proxy.expertier_tiers_unplaced(self._open_handle(), text, len(text))
        return text.value.decode()

    def counters(self) -> ProxyCounters:
        """Return what the proxy has counted so far."""
        return ProxyCounters.read(self._engine.proxy, self._open_handle())

    def compute_counts(self) -> ComputeCounts | None:
        """Return what the engine uses of the slab for computing, and the boundary's moves.

        None where the engine's compute buffers do not lie in the slab.
        """
        self._open_handle()
        return self._compute.counts() if self._compute is not None else None

    def take_error(self) -> tuple[str, BaseException | None]:
        """Return and clear this thread's last message of the proxy, and the exception of its last failed fill."""
        cause = getattr(self._fill_errors, "last", None)
        self._fill_errors.last = None
        text = ct.create_string_buffer(_ERROR_BYTES)
        if not self._engine.proxy.expertier_take_error(text, len(text)):
            return "", cause
        return text.value.decode(errors="replace"), cause

    def close(self) -> None:
        """Unbind, once the engine has freed the model; a second call does nothing.

        Raises:
            BusyError: the engine still holds slots, or computes in the slab; the binding stays, so that it can be
                closed again.
        """
        with interrupts_deferred():
            if self._handle is not None:
                if self._compute is not None and (n_buffers := self._compute.counts().buffers):
                    raise BusyError(
                        f"{n_buffers} compute buffers of the engine lie in the slab of these tiers: free its contexts "
                        "first"
                    )
                self._manager.engine.unbind()
                handle, self._handle = self._handle, None
                if self._serves_all_loads:
                    self._engine.proxy.expertier_tiers_set_default(None)
                self._engine.proxy.expertier_tiers_unbind(handle)
                if self._device_lookup is not None:
                    self._device_lookup.close()

    __del__ = closed_when_dropped

    def _open_handle(self) -> int:
        if self._handle is None:
            raise EngineError("the model's tiers were asked for after it was closed; open the model again")
        return self._handle

    def _serve_misses(self, _context: Any, layer: int, n: int, experts: Any, slots: Any, done: Any) -> None:
        """Fill slots for the engine, which uses the bytes only where `done` says that all of them are there."""

        def fill(wanted: Any) -> None:
            self._manager.engine.fill(layer, wanted, np.ctypeslib.as_array(slots, (n,)).copy())

        self._serve(n, experts, done, fill)

    def _serve_streamed(
        self, _context: Any, layer: int, n: int, experts: Any, address: int, done: Any
    ) -> None:
        """Copy experts into a streamed layer for the engine, which uses the bytes only where `done` says so."""
        self._serve(n, experts, done, lambda wanted: self._manager.engine.load(layer, wanted, address))

    def _serve_read(
        self, _context: Any, layer: int, matrix: int, offset: int, n_bytes: int, address: int, done: Any
    ) -> None:
        """Copy a part of a matrix to host memory for the engine, which uses the bytes only where `done` says so."""
        try:
            target = (ct.c_uint8 * n_bytes).from_address(address)
            self._manager.engine.read_back(layer, matrix, offset, memoryview(target).cast("B"))
            done[0] = abi.FILLED
        except BaseException as error:  # nothing may propagate into the engine's C++ frames
            self._note_error(error)
            _log.error("the engine read expert bytes of layer %d back, and that failed: %s", layer, error)

    def _serve(self, n: int, experts: Any, done: Any, serve: Callable[[Any], None]) -> None:
        try:
            serve(np.ctypeslib.as_array(experts, (n,)).copy())
            done[0] = abi.FILLED
            if self.on_fill is not None:
                self.on_fill(None)
        except BaseException as error:  # nothing may propagate into the engine's C++ frames
            self._note_error(error)
            if self.on_fill is not None:
                self.on_fill(error)

    def _note_error(self, error: BaseException) -> None:
        """Keep the exception that made this thread's batch fail."""
        self._fill_errors.last = error
