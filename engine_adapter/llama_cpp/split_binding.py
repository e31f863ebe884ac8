"""The tiers of several devices that share a model's experts, bound to the proxies over these devices."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields

from expertier.engine_adapter import proxy_abi as abi
from expertier.engine_adapter.llama_cpp.tier_binding import ProxyCounters, ProxyHolder, TierBinding
from expertier.errors import EngineError
from expertier.tiers.manager import TierManager

_ERROR_BYTES = 4096


class SplitBinding:
    """A binding a device, made and closed together; what `TierBinding` is for one device."""

    def __init__(self, engine: ProxyHolder, managers: Sequence[TierManager], devices: Sequence[str]) -> None:
        """Bind `managers[i]` to the engine's device `devices[i]`, until `close`. Raises as `TierBinding` does."""
        self._engine = engine
        with ExitStack() as undo:
            parts = []
            for manager, device in zip(managers, devices, strict=True):
                parts.append(TierBinding(engine, manager, device))
                undo.callback(parts[-1].close)
            undo.pop_all()
        self.parts = tuple(parts)
        """The bindings, in the order of the devices."""

    @property
    def devices(self) -> ct.Array[ct.c_void_p]:
        """Addresses of the ggml devices that every layer is split among."""
        return (ct.c_void_p * len(self.parts))(*(part.device for part in self.parts))

    def buffer_type(self, names: Sequence[str], splits: Sequence[abi.Split]) -> int:
        """Return the address of a ggml buffer type whose tensors `names[i]` are split as `splits[i]` says.

        Raises:
            EngineError: this engine has none.
        """
        n = len(names)
        error = ct.create_string_buffer(_ERROR_BYTES)
        address: int | None = self._engine.proxy.expertier_split_buffer_type(
            (ct.c_void_p * len(self.parts))(*(part.address for part in self.parts)),
            len(self.parts),
            (ct.c_char_p * n)(*(name.encode() for name in names)),
            (abi.Split * n)(*splits),
            n,
            error,
            len(error),
        )
        if not address:
            raise EngineError(f"this engine cannot split experts among devices: {error.value.decode()}")
        return address

    def require_no_leases_here(self, wish: str) -> None:
        """Raise `BusyError` where this thread's own leases hold slots that `wish` would wait for."""
        for part in self.parts:
            part.require_no_leases_here(wish)

    def begin_load(self) -> None:
        """Have slices of experts that this thread's loads allocate belong to the tiers of their device."""
        for part in self.parts:
            part.begin_load()

    def end_load(self) -> None:
        """End what `begin_load` began."""
        self.parts[0].end_load()

    def counters(self) -> ProxyCounters:
        """Return what the proxies have counted so far, added up: a layer counts once a device."""
        each = [part.counters() for part in self.parts]
        return ProxyCounters(
            **{field.name: sum(getattr(one, field.name) for one in each) for field in fields(ProxyCounters)}
        )

    def take_error(self) -> tuple[str, BaseException | None]:
        """Return and clear this thread's last message, and the exception of its last failed fill on any device."""
        taken = [part.take_error() for part in self.parts]
        message = next((text for text, _ in taken if text), "")
        cause = next((error for _, error in taken if error is not None), None)
        return message, cause

    def close(self) -> None:
        """Unbind all, once the engine has freed the model; a second call does nothing.

        Raises:
            BusyError: the engine still holds slots of a device; that one and those after it stay bound.
        """
        for part in self.parts:
            part.close()
