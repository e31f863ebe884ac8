"""A model whose experts are divided among several devices, with the tiers of each: `--split-mode tensor`.

file ──► SplitSource ─┬─► TierManager of device 0 ──► slices in its slots ──► its proxy ─┐
                      └─► TierManager of device 1 ──► slices in its slots ──► its proxy ─┴─► the engine's Meta device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from expertier.engine_adapter.engine_device import device_of
from expertier.engine_adapter.engine_tiers import N_STAGED_LAYERS
from expertier.engine_adapter.generation import Generation, generate
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.llama_cpp.split_binding import SplitBinding
from expertier.engine_adapter.llama_cpp.split_model import ask_split, open_bound_split_model
from expertier.errors import BudgetError, ConfigError
from expertier.hip.device import Device
from expertier.planner.context_memory import ContextShape
from expertier.planner.ledger import DeviceNeeds
from expertier.planner.trace import Phase
from expertier.tiers.config import TierConfig
from expertier.tiers.device_needs import device_needs
from expertier.tiers.file_source import FileSource
from expertier.tiers.manager import TierManager
from expertier.tiers.model_geometry import read_geometry
from expertier.tiers.split_source import SplitSource
from expertier.tiers.split_table import SplitTable
from expertier.tiers.staged_batches import resolve_stream_tokens
from expertier.tiers.table import ExpertTable


class SplitModel:
    """A loaded model and the tiers of its devices, closed together; `TieredModel` of several devices."""

    def __init__(
        self, model: LlamaModel, tiers: Sequence[TierManager], source: SplitSource, undo: ExitStack
    ) -> None:
        """Own the model and what `undo` frees; for `open`."""
        self.model = model
        self.tiers = tuple(tiers)
        """The managers, in the order of the devices."""
        self.source = source
        self._undo = undo

    @property
    def binding(self) -> SplitBinding:
        """The tiers' bindings to the proxies."""
        assert isinstance(self.model.binding, SplitBinding), "a split model is bound to several devices"
        return self.model.binding

    @classmethod
    def open(
        cls,
        engine: LoadedEngine,
        table: ExpertTable,
        config: TierConfig,
        devices: Sequence[str],
        *,
        shares: Sequence[float] | None = None,
        shape: ContextShape | None = None,
    ) -> SplitModel:
        """Make the tiers of each of the engine's devices named, and load the model of `table` through them.

        Budgets that `config` gives are those of all devices together, in proportion to their slices; `auto` fills each
        device by itself. `shares` are the devices' parts (`--tensor-split`), equal by default; `shape` is what the
        contexts will need room for.

        Raises:
            ConfigError: fewer than two devices, or a device twice. UnsupportedLayoutError: the experts cannot be split
                so; nothing was allocated. BudgetError: a budget is below what the model needs. DeviceError: there is
                no such device, or it has no memory left. EngineError: the engine refused the model.
        """
        if len(devices) < 2 or len(set(devices)) < len(devices):
            raise ConfigError(
                f"--split-mode tensor was asked for on {', '.join(devices) or 'no device'}: name two or more different "
                "devices, such as --device CUDA0,CUDA1"
            )
        engine.proxy  # noqa: B018 (registers our devices; the engine's own names are the same before and after)
        split = ask_split(engine, table, devices, shares)
        divided = SplitTable.of(table, split.cuts(), len(devices))
        with ExitStack() as undo:
            file = FileSource(table.files, config.file_mode, working_set_bytes=table.expert_bytes_total)
            undo.callback(file.close)
            source = SplitSource(file, divided)
            managers = []
            for number, name in enumerate(devices):
                device = device_of(engine.proxy, name)
                part = divided.parts[number]
                try:
                    manager = TierManager(
                        part,
                        device=device,
                        config=_of_part(config, part, table),
                        source=source.part(number),
                        needs=_needs(part, table, device, config, shape),
                    )
                except BudgetError as error:
                    raise BudgetError(f"device {name}: {error}") from error
                undo.callback(manager.close)
                managers.append(manager)
            binding = SplitBinding(engine, managers, devices)
            with ExitStack() as unbind:
                unbind.callback(binding.close)
                model = open_bound_split_model(engine, table, split, binding)
                unbind.pop_all()
            return cls(model, managers, source, undo.pop_all())

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
        """Return the tiers' statistics device by device, what the files were read for, and what the proxies counted."""
        load = self.model.load_counts()
        counters = self.binding.counters()
        return {
            "devices": [tiers.stats().as_dict() for tiers in self.tiers],
            "split": asdict(self.source.stats()),
            "load": {
                "expert_bytes_read": load.expert_bytes,
                "bytes_read": load.bytes_read,
                "expert_bytes_skipped": counters.dropped_writes,
            },
            "proxy": counters.as_dict(),
        }

    def check_valid(self) -> None:
        """Assert the invariants of all tiers and of the source; call it while nothing else runs."""
        for tiers in self.tiers:
            tiers.check_valid()
        self.source.check_valid()

    def close(self) -> None:
        """Free the model, then the tiers of every device, then the file."""
        self.model.close()
        self._undo.close()

    def __enter__(self) -> SplitModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _of_part(config: TierConfig, part: ExpertTable, whole: ExpertTable) -> TierConfig:
    """Return the config of one device: its share of the budgets, and no gate, whose host part serves one device."""
    return replace(
        config,
        expert_cache_bytes=_share(config.expert_cache_bytes, part, whole),
        host_pool_bytes=_share(config.host_pool_bytes, part, whole),
        cap_bytes=_share(config.cap_bytes, part, whole),
        decode_gate=False,
    )


def _share(n_bytes: int | str, part: ExpertTable, whole: ExpertTable) -> Any:
    if not isinstance(n_bytes, int):
        return n_bytes
    return -(-n_bytes * part.expert_bytes_total // whole.expert_bytes_total)


def _needs(
    part: ExpertTable, whole: ExpertTable, device: Device, config: TierConfig, shape: ContextShape | None
) -> DeviceNeeds | None:
    if not device.has_own_memory:
        return None
    layers = zip(part.layers, part.slot_layouts, strict=True)
    largest = max(layout.range_bytes(layer.n_experts) for layer, layout in layers)
    return device_needs(
        read_geometry(whole.path),
        shape if shape is not None else ContextShape(full_windows=True),  # as llama.cpp by default
        free_bytes=device.free_bytes(),
        staging_bytes=N_STAGED_LAYERS * largest if resolve_stream_tokens(config, device) else 0,
        share=part.expert_bytes_total / whole.expert_bytes_total,
    )
