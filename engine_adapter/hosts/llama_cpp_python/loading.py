"""Catches the loads of llama-cpp-python, so that they go through the tiers.

`llama_cpp.Llama` makes parameters, model and context in one constructor, and its model class loads the file in its own
constructor. A subclass cannot step in between, and copies of either constructor would have to follow each release. But
both constructors go through one function of llama.h, `llama_model_load_from_file(path, params)`, which they look up in
the module each time. So that function is wrapped, once in a process. The wrapper sees the parameters when they are
complete, key-value overrides included. It knows by the thread which `Llama` asked for the model, and `served_by` checks
that the load did come through it.

    Llama(...) ─► served_by(open) ─► llama_cpp.Llama.__init__ ─► LlamaModel.__init__ ─► the wrapper ─► open(params)

The wrapper also keeps all other loads of the process off our devices (docs/decisions/0007), because llama.cpp takes a
registered proxy for a GPU.
"""

from __future__ import annotations

import ctypes as ct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from expertier.errors import EngineMismatchError

Open = Callable[[Any], int]
"""Opens a model with the given llama_model_params and returns the address of its llama_model."""

_FUNCTION = "llama_model_load_from_file"
_MARK = "served_by_expertier"

_wanted = threading.local()
_wrapping = threading.Lock()


@contextmanager
def served_by(open_model: Open) -> Iterator[None]:
    """Have the next load of this thread served by `open_model`; `wrap` must have been called before.

    Raises:
        EngineMismatchError: the block ended without an error, but no load came through the wrapper.
    """
    _wanted.open_model = open_model
    try:
        yield
        came = _wanted.open_model is None
    finally:
        _wanted.open_model = None
    if not came:
        raise EngineMismatchError(
            f"llama_cpp.Llama did not load its model with {_FUNCTION}, so that no tiers are in it: something in this "
            "process has replaced parts of llama-cpp-python; use it as it was installed"
        )


def wrap(package: Any, stock_devices: Callable[[], int | None]) -> None:
    """Wrap the function in the package and in its module that binds llama.h; a second call does nothing.

    `stock_devices` returns the list of devices for loads that are not ours; None where the engine may choose.
    """
    with _wrapping:
        stock = getattr(package.llama_cpp, _FUNCTION)
        if getattr(stock, _MARK, False):
            return

        def load(path: bytes, params: Any, /) -> Any:
            open_model: Open | None = getattr(_wanted, "open_model", None)
            if open_model is not None:
                _wanted.open_model = None
                return open_model(params)
            if not params.devices and (devices := stock_devices()):
                params = type(params).from_buffer_copy(params)  # a copy, so that the caller's parameters stay
                params.devices = devices
            return stock(path, params)

        setattr(load, _MARK, True)
        load.__doc__ = stock.__doc__
        for module in (package.llama_cpp, package):
            setattr(module, _FUNCTION, load)


def as_parameters(params: Any) -> ct.Structure:
    """Return the llama_model_params that a load came with. Errors: EngineMismatchError."""
    if not isinstance(params, ct.Structure):
        raise EngineMismatchError(
            f"{_FUNCTION} was called with {type(params).__name__} in place of llama_model_params: use "
            "llama-cpp-python as it was installed"
        )
    return params
