"""Runs llama-cpp-python with the tiers: `Llama` here takes the place of `llama_cpp.Llama`.

    from expertier.engine_adapter.hosts.llama_cpp_python import Llama      instead of: from llama_cpp import Llama

    llama.py        the class: arguments, opening, closing
    loading.py      how we get to serve its load
    batches.py      batches whose experts could not be read raise, and leave nothing behind
    bindings.py     finds llama-cpp-python, builds the plugin for it, checks that both fit
    in_use.py       which files the libraries of this process are

llama-cpp-python has to be installed: pip install 'expertier[llama-cpp-python]' compiles it. It is imported when `Llama`
is first asked for, so that this package can be imported without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertier.engine_adapter.hosts.llama_cpp_python.llama import Llama

__all__ = ["Llama"]


def __getattr__(name: str) -> Any:
    """Import `Llama` at first use. Errors: EngineMissingError, EngineMismatchError."""
    if name == "Llama":
        from expertier.engine_adapter.hosts.llama_cpp_python.llama import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
