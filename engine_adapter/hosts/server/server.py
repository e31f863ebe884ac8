"""The wheel's own llama-server in this process, with the experts in our tiers.

    engine ── TierManager ── TierBinding ── xllamacpp.Server ── Unix socket ── ServerGuard ── clients
                                             loads the skeleton, computes on our device, sends misses to the binding

The wheel's Server holds the interpreter's lock while it is made and while it is freed. While it is made, the engine
runs a graph (a trial of two tokens, whose output it does not read), and while it is freed, the engine may run a graph.
A miss would wait for the lock forever. So the trial gets zeros for missing experts, and misses are refused before the
server is freed. A request that runs while the server is freed would never end either, so all connections are closed
first.
"""

from __future__ import annotations

import ctypes as ct
import importlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from expertier.engine_adapter.allowed_hosts import AllowedHosts
from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.engine_adapter.hosts.server.guard import ServerGuard, bound_socket, private_socket
from expertier.engine_adapter.hosts.server.sockets import shut_sockets
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.llama_cpp.skeleton import ensure_skeleton
from expertier.engine_adapter.open import open_bound_tiers
from expertier.engine_adapter.opening import closed_if_interrupted
from expertier.engine_adapter.placement.device_traits import traits_of
from expertier.engine_adapter.placement.override_pattern import placed_regex
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import BusyError, ConfigError, EngineError
from expertier.interrupts import interrupts_deferred, raise_pending
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet

WITHOUT_MEMORY = frozenset({"nomic-bert-moe", "llada-moe", "rnd1"})
"""Architectures without a key-value cache. The engine makes no trial with them: their first graph serves a request."""

_ALL_LAYERS = 999
_SHUT_TIMEOUT_S = (
    10  # the time for requests to notice that their clients are gone, which they check once a second
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server runs. `n_ctx` is in tokens for each of `n_parallel` requests; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8080
    n_parallel: int = 1
    n_ctx: int = 4096
    n_ubatch: int = 512
    n_threads: int = 0
    api_key: str | None = None
    verbosity: int = 2
    """What the engine logs on standard error: 1 errors, 2 warnings, 3 each request, 5 everything."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides `host` and those of loopback that clients may ask for."""

    @property
    def hosts(self) -> AllowedHosts:
        """The names that clients may ask for."""
        return AllowedHosts.of(self.host, self.allowed_hosts)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the host."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class TieredServer:
    """A running server and the tiers that serve its experts. A process has at most one."""

    _one: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, engine: LoadedEngine, server: Any, guard: ServerGuard, binding: BindingSet, closing: ExitStack
    ) -> None:
        self._engine = engine
        self._server = server
        self._guard = guard
        self._closing = closing
        self.url = guard.url
        self.binding = binding

    @classmethod
    @closed_if_interrupted
    def start(
        cls, engine: LoadedEngine, table: ExpertTable, config: TierConfig, options: ServerOptions
    ) -> TieredServer:
        """Make the tiers, load the model through them and listen. No other Python code can run meanwhile.

        Raises:
            BusyError: this process serves already. ConfigError: the address cannot be used. BudgetError: a budget
                is below what the model needs. EngineError: the engine refused the model, and has said why on standard
                error.
        """
        with ExitStack() as closing:
            if not cls._one.acquire(blocking=False):
                raise BusyError(
                    "this process already serves a model: stop that server first, or use another process"
                )
            closing.callback(cls._one.release)
            closing.callback(engine.keep_log)
            guard = closing.enter_context(ServerGuard(options.host, options.port, options.hosts))
            path = closing.enter_context(private_socket())
            skeleton = ensure_skeleton(table)
            shape = ContextShape(
                n_ctx=options.n_ctx * options.n_parallel, n_ubatch=options.n_ubatch, n_seqs=options.n_parallel
            )
            bound = open_bound_tiers(engine, table, config, shape, splitter=engine)
            closing.callback(bound.close)
            tiers, placement, binding = bound.tiers, bound.placement, bound.binding
            _require_engine_order(engine, placement)
            binding.serve_all_loads()
            params = stock_params(str(skeleton), options)
            params.hostnames = [str(path)]
            _place_in_tiers(params, engine, table, binding, placement)
            if placement.tensors is not None:
                tiers.drain()  # queued experts could not arrive while the wheel holds the interpreter's lock
            raise_pending()
            with _only_ours(engine, placement):
                server = _load(params, table, binding)
            try:
                for each in binding.bindings:
                    if table.architecture not in WITHOUT_MEMORY and each.counters().graphs == 0:
                        raise EngineError(f"the engine did not place the layers on {each.device_name}")
                if placement.is_split and (tensor := binding.find_unplaced()):
                    raise EngineError(f"the engine did not place {tensor} on the device whose tiers hold it")
                guard.open(path)
                return cls(engine, server, guard, binding, closing.pop_all())
            except BaseException:
                binding.refuse_misses()
                del server  # freed before the tiers
                raise

    @property
    def tiers(self) -> TierSet:
        """The tiers."""
        return self.binding.tiers

    def stop(self) -> None:
        """End all requests, free the server, its model and the tiers; a second call does nothing."""
        with interrupts_deferred():
            if self._server is not None:
                self.binding.refuse_misses()
                _silence(self._engine)  # it would log the end of the connections as an error
                self._guard.close()  # its thread could not run while the server is freed
                shut_sockets(str(self._server.listening_address), _SHUT_TIMEOUT_S)
                self._server = None
                self._closing.close()

    close = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _load(params: Any, table: ExpertTable, binding: BindingSet) -> Any:
    wheel = _wheel()
    if table.architecture in WITHOUT_MEMORY:
        binding.refuse_misses()
    else:
        binding.zero_fill_next_graph()
    try:
        server = wheel.Server(params)
        server.handle_metrics()  # returns once the server's loop runs; a stop before that would be lost
        return server
    except (RuntimeError, ValueError) as error:
        ours = binding.take_error()[0]
        raise EngineError(
            f"llama-server could not start with {table.path}: {ours or error}; its own lines above say more"
        ) from error
    finally:
        binding.serve_misses()


def stock_params(model: str, options: ServerOptions) -> Any:
    """Return llama-server's parameters for these options, without the tiers and without weight repacking."""
    wheel = _wheel()
    params = wheel.CommonParams()
    params.model.path = model
    params.model_alias = [Path(model).name]
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.n_parallel
    params.n_ctx = options.n_ctx * options.n_parallel
    params.n_ubatch = options.n_ubatch
    threads = options.n_threads or len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.api_keys = [options.api_key] if options.api_key else []
    params.cors_origins = "localhost"  # otherwise any web page could use a server without a key
    params.cors_credentials = False
    params.verbosity = options.verbosity
    params.endpoint_metrics = True
    params.warmup = False
    params.fit_params = False
    params.no_extra_bufts = True
    params.cache_ram_mib = 0  # a cache of prompts in RAM would be outside of our budgets
    params.load_mode = wheel.llama_load_mode.LLAMA_LOAD_MODE_NONE
    return params


def _place_in_tiers(
    params: Any, engine: LoadedEngine, table: ExpertTable, binding: BindingSet, placement: Placement
) -> None:
    wheel = _wheel()
    params.model_alias = [table.path.name]
    params.n_gpu_layers = _ALL_LAYERS
    with _names_of_experts(engine, table, binding, placement) as overrides:
        params.tensor_buft_overrides = overrides  # the wheel looks their names up in this assignment
    if placement.tensors is not None:
        params.split_mode = wheel.llama_split_mode.LLAMA_SPLIT_MODE_TENSOR
        shares = list(placement.tensors.shares or ())
        params.tensor_split = shares + [0.0] * (len(params.tensor_split) - len(shares))
    elif placement.is_split:
        params.split_mode = wheel.llama_split_mode.LLAMA_SPLIT_MODE_LAYER
        units = [float(units) for units in placement.units]
        params.tensor_split = units + [0.0] * (len(params.tensor_split) - len(units))
    else:
        params.split_mode = wheel.llama_split_mode.LLAMA_SPLIT_MODE_NONE
        params.main_gpu = _gpu_index(engine, binding.device_name)


@contextmanager
def _names_of_experts(
    engine: LoadedEngine, table: ExpertTable, binding: BindingSet, placement: Placement
) -> Iterator[str]:
    """Yield the server's option that places the experts, by the names of buffer types that exist inside the block."""
    if placement.tensors is None:
        yield ",".join(
            f"{placed_regex(each.manager.table, is_split=placement.is_split)}={each.buffer_type_name}"
            for each in binding.bindings
        )
        return
    addresses = [each.address for each in binding.bindings]
    split = placement.tensors.buffer_type(engine.proxy, addresses)
    name: bytes = engine.proxy.expertier_name_split_type(addresses[0], split)
    try:
        yield f"{placed_regex(table, is_split=False)}={name.decode()}"
    finally:
        engine.proxy.expertier_name_split_type(addresses[0], None)


@contextmanager
def _only_ours(engine: LoadedEngine, placement: Placement) -> Iterator[None]:
    """Let the wheel's server, whose parameters name no devices, find the placement's devices and no other GPU.

    The server would place tensors that are not experts on any other GPU, and graphs would be split between the GPUs.
    """
    if not placement.is_split:
        yield
        return
    names = (ct.c_char_p * len(placement.devices))(*(name.encode() for name in placement.devices))
    engine.proxy.expertier_show_only(names, len(names), int(placement.tensors is not None))
    try:
        yield
    finally:
        engine.proxy.expertier_show_all()


def _require_engine_order(engine: LoadedEngine, placement: Placement) -> None:
    """Raise ConfigError where MOE_DEVICE names devices in another order than the one in which the server uses them."""
    order = [device["name"] for device in engine.devices()]
    wanted = sorted(placement.devices, key=order.index)
    if wanted != list(placement.devices):
        raise ConfigError(
            f"MOE_DEVICE={placement.device_name}: the server uses devices in the engine's order; give "
            f"{','.join(wanted)}"
        )


def _wheel() -> Any:
    """Return the wheel's Python module. It has the engine's library, so call this after the engine is loaded."""
    return importlib.import_module("xllamacpp")


def _silence(engine: LoadedEngine) -> None:
    """Have the server log nothing from now on; the next server sets its own verbosity."""
    engine.symbol("_Z30common_log_set_verbosity_tholdi", None, ct.c_int)(-1)


def _gpu_index(engine: LoadedEngine, device_name: str) -> int:
    """Return the place of our device among those that the engine lists as GPUs, in the engine's order."""
    names = [device["name"] for device in engine.devices() if traits_of(device["name"]).is_listed_gpu]
    return names.index(device_name)


def check_address(options: ServerOptions, option: str = "--port") -> None:
    """Raise ConfigError where the address cannot be listened on, before a model is loaded for it."""
    bound_socket(options.host, options.port, option).close()
