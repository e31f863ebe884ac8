"""What the tests of tests/field share: tiers on devices that are watched, sources that wait, stock logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

import expertier as et
from engine_runs.tiered_runs import SMALL, prompt_tokens, run_model
from expertier.engine_adapter.llama_cpp import LlamaContext, LoadedEngine
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.hip.host import HostDevice
from expertier.tiers.model.span import Span
from model_files.gguf_files import BytesSource, ModelFile

PROMPT = prompt_tokens(40)
FEW_SLOTS = SMALL.top_k + 1
PATIENCE_S = 30  # for what must happen


def config_for(table: et.ExpertTable, n_slots: int, host_pool_bytes: int = 0) -> et.TierConfig:
    budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
    return et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=host_pool_bytes)


def tiers_on(
    device: object, model: ModelFile, n_slots: int, host_pool_bytes: int = 0, source: object = None
) -> et.TierManager:
    config = config_for(model.table, n_slots, host_pool_bytes)
    return et.TierManager(model.table, device=device, config=config, source=source)


def wrong_after(model: ModelFile, tiers: et.TierManager, layer: int, experts: Sequence[int]) -> list:
    """Use experts once, and return those whose bytes were not the file's."""
    with tiers.acquire(layer, experts) as lease:
        return [wrong for group in lease.groups for wrong in model.wrong_bytes(lease, group)]


class WatchedDevice:
    """The host as a device: it knows its pinned ranges and the sources of its copies, and may be held up.

    One that `doubles` allocates powers of two only, from 16 KiB up: twice as much as the experts need.
    """

    def __init__(self, *, doubles: bool = False) -> None:
        self.inner = HostDevice()
        self.pinned: dict[int, int] = {}
        self.strangers: list[int] = []
        self.n_copies = 0
        self.hold_up: Callable[[], None] | None = None
        self._doubles = doubles

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def allocation_bytes(self, n_bytes: int) -> int:
        pages = self.inner.allocation_bytes(n_bytes)
        return max(16384, 1 << (pages - 1).bit_length()) if self._doubles else pages

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        return self.allocation_bytes(n_bytes)

    def alloc_pinned(self, n_bytes: int) -> int:
        size = self.allocation_bytes(n_bytes)
        address = self.inner.alloc_pinned(size)
        self.pinned[address] = size
        return address

    def free(self, address: int) -> None:
        self.pinned.pop(address, None)
        self.inner.free(address)

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy one half, wait where a test wants that, copy the other half."""
        self.n_copies += 1
        if not any(begin <= source and source + n_bytes <= begin + n for begin, n in self.pinned.items()):
            self.strangers.append(source)
        half = n_bytes // 2
        self.inner.copy_in(target, source, half, stream)
        if self.hold_up is not None:
            self.hold_up()
        self.inner.copy_in(target + half, source + half, n_bytes - half, stream)


class PausedSource:
    """Bytes in memory whose reads wait until they are let through."""

    def __init__(self, data: bytes) -> None:
        self.inner = BytesSource(data)
        self.reading = threading.Event()
        self.may_read = threading.Event()

    def read_into(self, span: Span, buffer: memoryview) -> None:
        self.reading.set()
        assert self.may_read.wait(PATIENCE_S)
        self.inner.read_into(span, buffer)


class Workers:
    """Threads whose errors are not lost."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a thread waits for ever"
        assert self.errors == []


@cache
def stock(engine: LoadedEngine, path: Path, prompt: tuple[int, ...], n_tokens: int, n_ubatch: int) -> bytes:
    """The stock engine's logits of a prompt and what it continues with."""
    run = run_model(engine, path, None, prompt=list(prompt), n_tokens=n_tokens, n_ubatch=n_ubatch)
    assert np.isfinite(run.logits).all()
    return run.logits.tobytes()


def generated(context: LlamaContext, prompt: Sequence[int], n_tokens: int) -> bytes:
    """The logits of a prompt and what follows, from an empty cache."""
    context.forget()
    return np.stack(generate(context, prompt, n_tokens, keep_logits=True).logits).tobytes()
