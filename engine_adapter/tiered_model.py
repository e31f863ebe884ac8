"""A model with its tiers on a loaded engine: what `run` and other hosts in this process open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.llama_cpp.generation import Generation, generate
from expertier.engine_adapter.open import open_tiers
from expertier.engine_adapter.opening import close_after, closed_if_interrupted, closed_when_dropped
from expertier.engine_adapter.placement.placement import Placement
from expertier.interrupts import interrupts_deferred, not_interrupted_at_entry, raise_pending
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.traces.trace import Phase
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet


class TieredModel:
    """A loaded model and the tiers that serve its experts, closed together."""

    def __init__(self, model: LlamaModel, tiers: TierSet, placement: Placement) -> None:
        self.model = model
        self.tiers = tiers
        self.placement = placement

    @property
    def binding(self) -> BindingSet:
        """The tiers' binding to the proxy."""
        assert self.model.binding is not None, "a tiered model is bound"
        return self.model.binding

    @classmethod
    @closed_if_interrupted
    def open(
        cls,
        engine: LoadedEngine,
        table: ExpertTable,
        config: TierConfig,
        *,
        lookups: LookupLog | None = None,
        shape: ContextShape | None = None,
    ) -> TieredModel:
        """Make the tiers for `table` and load its model through them; `lookups` logs the experts that it looks up.

        The tiers are on the engine's devices that `config.engine_device` names. `shape` describes the contexts that
        these devices need room for.

        Raises:
            BudgetError: a budget is below what the model needs. EngineError: the engine refused the model.
            DeviceError: there is no such device, or it has no memory left. UnsupportedLayoutError: the model's experts
                cannot be cut up for the devices.
        """
        tiers, placement = open_tiers(engine, table, config, shape, splitter=engine)
        try:
            raise_pending()
            model = LlamaModel.open(engine, table.path, tiers=tiers, placement=placement, lookups=lookups)
            return cls(model, tiers, placement)
        except BaseException:
            tiers.close()
            raise

    def generate(
        self,
        tokens: Sequence[int],
        n_tokens: int,
        *,
        n_ctx: int,
        n_ubatch: int = 512,
        n_threads: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[int], bool] | None = None,
        after_batch: Callable[[Phase, int], None] | None = None,
    ) -> Generation:
        """Continue `tokens` by up to `n_tokens` in a context of its own."""
        with self.model.context(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads) as context:
            context.set_sampler(temperature, seed)
            return generate(context, tokens, n_tokens, on_token=on_token, after_batch=after_batch)

    def describe(self) -> dict[str, Any]:
        """Return the tiers' statistics, what loading read, and what the proxy counted, for a report.

        Where the engine computes in the slab, the report also has the bytes that it takes there, and the moves.
        """
        counters = self.binding.counters()
        devices = [
            {"device": name, "layers": manager.table.n_layers, **manager.stats().as_dict()}
            for name, manager in zip(self.placement.devices, self.tiers.managers, strict=True)
        ]
        load = self.model.load_counts()
        compute = self.binding.compute_counts()
        split = self.tiers.split_source
        return {
            **self.tiers.stats().as_dict(),
            "load": {
                "expert_bytes_read": load.expert_bytes,
                "bytes_read": load.bytes_read,
                "expert_bytes_skipped": counters.dropped_writes,
            },
            "proxy": counters.as_dict(),
            **({"devices": devices} if len(devices) > 1 else {}),
            **({"slab_compute": asdict(compute)} if compute is not None else {}),
            **({"shards": asdict(split.stats())} if split is not None else {}),
        }

    def close(self) -> None:
        """Free the model, then the tiers."""
        with interrupts_deferred():
            self.model.close()
            self.tiers.close()

    __del__ = closed_when_dropped

    @not_interrupted_at_entry
    def __enter__(self) -> TieredModel:
        return self

    @not_interrupted_at_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)
