"""The binding of a model's tiers: one a device, on one device or on several, used as if they were one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields

from expertier.engine_adapter.abi.counters import ProxyCounters
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.engine_adapter.binding.slab_compute import ComputeCounts
from expertier.engine_adapter.binding.tier_binding import ProxyHolder, TierBinding
from expertier.engine_adapter.opening import closed_if_interrupted
from expertier.engine_adapter.placement.placement import Placement
from expertier.interrupts import interrupts_deferred
from expertier.tiers.tier_set import TierSet


class BindingSet:
    """The tiers of a model, each manager bound to the proxy over its own device, until `close`."""

    def __init__(
        self,
        engine: ProxyHolder,
        tiers: TierSet,
        placement: Placement,
        lookups: LookupLog | None = None,
    ) -> None:
        """Bind all of them, or none. Raises what `TierBinding` does."""
        self.tiers = tiers
        """The tiers that are bound."""
        with ExitStack() as undo:
            bindings: list[TierBinding] = []
            for manager, device, layers in zip(tiers.managers, placement.devices, tiers.layers, strict=True):
                # Devices that share every tensor look up the same experts, so one of them logs these.
                logged = lookups if not bindings or placement.tensors is None else None
                binding = TierBinding(engine, manager, device, logged, layers)
                undo.callback(binding.close)
                bindings.append(binding)
            tiers.complete_layers()
            undo.pop_all()
        self.bindings = tuple(bindings)
        """The bindings of the single devices, in the order of the placement."""

    @property
    def device_name(self) -> str:
        """Names of the devices that layers are placed on, with commas between them."""
        return ",".join(binding.device_name for binding in self.bindings)

    @property
    def on_fill(self) -> Callable[[BaseException | None], None] | None:
        """Called after each fill of any of the bindings (`TierBinding.on_fill`)."""
        return self.bindings[0].on_fill

    @on_fill.setter
    def on_fill(self, called: Callable[[BaseException | None], None] | None) -> None:
        for binding in self.bindings:
            binding.on_fill = called

    def begin_load(self) -> None:
        """Have expert tensors that this thread's loads allocate belong to these tiers, each to its device's tiers."""
        for binding in self.bindings:
            binding.begin_load()

    def end_load(self) -> None:
        """End what `begin_load` began."""
        self.bindings[0].end_load()

    def serve_all_loads(self) -> None:
        """Have expert tensors that the engine's own threads load belong to these tiers, until `close`."""
        for binding in self.bindings:
            binding.serve_all_loads()

    def serve_misses(self) -> None:
        """Have misses filled again, after `zero_fill_next_graph` or `refuse_misses`."""
        for binding in self.bindings:
            binding.serve_misses()

    def zero_fill_next_graph(self) -> None:
        """Have the misses of the next graph of each device be zeros (`TierBinding.zero_fill_next_graph`)."""
        for binding in self.bindings:
            binding.zero_fill_next_graph()

    def refuse_misses(self) -> None:
        """Have batches that miss fail instead of asking Python; returns once no fill is running."""
        for binding in self.bindings:
            binding.refuse_misses()

    def find_unplaced(self) -> str:
        """Return the first expert tensor that the engine has not placed where it should have; empty: none."""
        return next(filter(None, (binding.find_unplaced() for binding in self.bindings)), "")

    def counters(self) -> ProxyCounters:
        """Return the sums of what the proxy has counted on each device; each device runs its share of a graph."""
        return ProxyCounters.total(binding.counters() for binding in self.bindings)

    def compute_counts(self) -> ComputeCounts | None:
        """Return the sums of what the engine computes in of the devices' slabs; None where it does so elsewhere."""
        counted = [counts for binding in self.bindings if (counts := binding.compute_counts()) is not None]
        if not counted:
            return None
        return ComputeCounts(
            **{
                field.name: sum(getattr(each, field.name) for each in counted)
                for field in fields(ComputeCounts)
            }
        )

    def take_error(self) -> tuple[str, BaseException | None]:
        """Return and clear this thread's last message of the proxy, and the exception of its last failed fill.

        The message counts the layers of one device, so it says which device that is.
        """
        message, cause = "", None
        for binding, layers in zip(self.bindings, self.tiers.layers, strict=True):
            said, error = binding.take_error()
            message = message or said
            if error is not None and cause is None:
                cause = error
                if len(self.bindings) > 1:
                    message += f" (on {binding.device_name}, which has the model's layers {layers[0]} to {layers[-1]})"
        return message.strip(), cause

    def close(self) -> None:
        """Unbind, once the engine has freed the model; a second call does nothing.

        Raises:
            BusyError: the engine still holds slots; that binding stays, so that it can be closed again.
        """
        with interrupts_deferred(), ExitStack() as each:
            for binding in self.bindings:
                each.callback(binding.close)


@closed_if_interrupted
def bind(
    engine: ProxyHolder, tiers: TierSet, placement: Placement, lookups: LookupLog | None = None
) -> BindingSet:
    """Bind tiers to the proxies over the devices that they were placed on. Raises what `TierBinding` does."""
    return BindingSet(engine, tiers, placement, lookups)
