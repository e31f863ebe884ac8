"""Devices of other machines: llama.cpp's RPC servers, added to an engine before it gets our proxies."""

from __future__ import annotations

import ctypes as ct
import socket
from collections.abc import Sequence

from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.errors import EngineError

_CONNECT_TIMEOUT_S = 10


def add_rpc_servers(engine: LoadedEngine, endpoints: Sequence[str]) -> None:
    """Have the engine use the devices of servers at `endpoints` (`host:port`): RPC0, RPC1, ... in their order.

    Raises:
        EngineError: the engine was built without RPC, a server does not answer, or our proxies exist already.
    """
    if not endpoints:
        return
    if engine.has_proxy:
        raise EngineError(
            f"asked for RPC servers {', '.join(endpoints)} after the tiers were first used in this process; name them "
            "when the engine is opened"
        )
    by_name = engine.symbol("ggml_backend_reg_by_name", ct.c_void_p, ct.c_char_p)
    function_of = engine.symbol("ggml_backend_reg_get_proc_address", ct.c_void_p, ct.c_void_p, ct.c_char_p)
    register = engine.symbol("ggml_backend_register", None, ct.c_void_p)
    rpc = by_name(b"RPC")
    address = function_of(rpc, b"ggml_backend_rpc_add_server") if rpc else None
    if not address:
        raise EngineError(
            f"asked for RPC servers {', '.join(endpoints)}, but the engine {engine.library_paths[-1]} was built "
            "without RPC: build llama.cpp with -DGGML_RPC=ON and give its folder with --llama-cpp DIR"
        )
    add_server = ct.CFUNCTYPE(ct.c_void_p, ct.c_char_p)(address)
    for endpoint in endpoints:
        _require_listening(endpoint)
        server = add_server(endpoint.encode())
        if not server:
            raise EngineError(
                f"asked for the RPC server {endpoint}: it has no device; "
                "start llama.cpp's ggml-rpc-server there, of the same release"
            )
        register(server)


def _require_listening(endpoint: str) -> None:
    """Raise `EngineError` where no server listens, as ggml would end the process then."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(
            f"asked for the RPC server {endpoint!r}: {error}; give host:port of a running ggml-rpc-server of the same "
            "llama.cpp release"
        ) from error
