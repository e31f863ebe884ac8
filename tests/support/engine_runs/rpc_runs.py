"""What tests of RPC servers do in processes of their own: an engine keeps its servers until it ends."""

from __future__ import annotations

from pathlib import Path

from devices.device_parity import compare_on
from expertier.engine_adapter.open import open_engine
from expertier.errors import EngineError


def compare(llama_cpp: Path, server: str, path: Path) -> dict[str, int]:
    """In a process of its own: stock with everything on the server, and the tiers there."""
    return compare_on(open_engine(llama_cpp, rpc_servers=[server]), "RPC0", path)


def refused(llama_cpp: Path | None, endpoint: str) -> str:
    try:
        open_engine(llama_cpp, rpc_servers=[endpoint])
    except EngineError as error:
        return str(error)
    return ""
