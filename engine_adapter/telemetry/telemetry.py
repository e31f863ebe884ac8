"""Logs events on the `expertier` logger, a line of `key=value` each: the tiers' sizes, first use, failures and counts.

    event=enabled model=model.gguf slots=191 requested_slots=191 ... limited_by=budget
    event=summary hits=1108 misses=1663 hit_rate=0.400 turn_hits=1108 ...

There are no lines for single tokens. `show_events` writes these lines, and our warnings in the same form, to standard
error.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.engine_adapter.telemetry.signals import on_signal
from expertier.planner.budget.allocate import plan_layers
from expertier.tiers.config.budget import resolve
from expertier.tiers.config.config import TierConfig
from expertier.tiers.shared.stats import TierStats
from expertier.tiers.tier_set import TierSet

Value = str | int | float

_log = logging.getLogger(__name__)
_ROOT = "expertier"
_PLAIN = re.compile(r"[\w./:+@%~,-]+")
_NO_LIMIT = 1 << 62


def event_line(event: str, **fields: Value) -> str:
    """Return one line: the event and its fields in their order, texts in JSON's quotes where they need quotes.

    Fractions have three digits after the point, and none of a line's values ever holds a line break.
    """
    return " ".join(f"{key}={_text(value)}" for key, value in {"event": event, **fields}.items())


class Telemetry:
    """The events of one model's tiers."""

    def __init__(self, manager: TierSet, config: TierConfig) -> None:
        """Begin to count: a turn begins here, and then at each summary."""
        self._manager = manager
        self._config = config
        self._lock = threading.Lock()
        self._used = False
        self._last = manager.stats()

    def enabled(self) -> None:
        """Log the sizes that the tiers got, and what limited them."""
        manager, stats = self._manager, self._manager.stats()
        requested = requested_slots(manager, self._config)
        _event(
            "enabled",
            model=manager.table.path.name,
            requested_slots=requested,
            slots=stats.l1.slots,
            **({"devices": len(manager.managers)} if len(manager.managers) > 1 else {}),
            experts=sum(layer.n_experts for layer in manager.table.layers),
            l1_bytes=stats.l1.budget_bytes,
            l2_bytes=stats.l2.budget_bytes,
            expert_bytes=manager.table.expert_bytes_total,
            policy=str(self._config.policy),
            limited_by=limited_by(manager, requested),
        )

    def note_fill(self, error: BaseException | None) -> None:
        """Log that the first fill was served, or that a fill failed; for `TierBinding.on_fill`."""
        if error is not None:
            _event("fill_failed", model=self._manager.table.path.name, reason=_reason(error))
        elif not self._used:
            self._used = True
            _event("first_use", model=self._manager.table.path.name)

    def summary(self) -> None:
        """Log the counts since the start, and those of the turn since the last summary."""
        with self._lock:
            now = self._manager.stats()
            last, self._last = self._last, now
        hits, misses = now.l1.hits - last.l1.hits, now.l1.misses - last.l1.misses
        _event(
            "summary",
            model=self._manager.table.path.name,
            hits=now.l1.hits,
            misses=now.l1.misses,
            evictions=now.l1.evictions,
            hit_rate=_rate(now.l1.hits, now.l1.misses),
            l2_hits=now.l2.hits,
            l2_misses=now.l2.misses,
            **_bytes_by_path(now),
            failed_reads=now.file.failures,
            turn_hits=hits,
            turn_misses=misses,
            turn_hit_rate=_rate(hits, misses),
            turn_bytes_from_file=now.file.bytes_read - last.file.bytes_read,
        )


@contextmanager
def watched(binding: BindingSet, config: TierConfig) -> Iterator[Telemetry]:
    """Log a bound model's events while the block runs: now, at SIGUSR1 and at the end. On the main thread only."""
    telemetry = Telemetry(binding.tiers, config)
    binding.on_fill = telemetry.note_fill
    telemetry.enabled()
    try:
        with on_signal(signal.SIGUSR1, telemetry.summary):
            yield telemetry
    finally:
        binding.on_fill = None
        telemetry.summary()


def say_disabled(model: str, reason: str) -> None:
    """Log that a model does not run through the tiers, and why."""
    _event("disabled", model=model, reason=reason)


def requested_slots(manager: TierSet, config: TierConfig) -> int:
    """Return how many slots the requested budget has room for: at most one for each expert, whatever the RAM."""
    wanted = resolve(config, manager.table, _NO_LIMIT).expert_cache_bytes
    return sum(plan_layers(manager.table.layer_demands(), budget_bytes=wanted).slots)


def limited_by(manager: TierSet, requested: int) -> str:
    """Return what limits the number of slots: `slots` (every expert has one), `ram`, or the `budget`."""
    slots = sum(manager.slots)
    if slots >= sum(layer.n_experts for layer in manager.table.layers):
        return "slots"
    return "ram" if slots < requested else "budget"


class EventFormatter(logging.Formatter):
    """Writes events as they are, and any other message of ours as an event named after its level."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        message = record.getMessage()
        if getattr(record, "is_event", False):
            return message
        return event_line(record.levelname.lower(), source=record.name, message=message)


@contextmanager
def show_events(stream: TextIO | None = None) -> Iterator[None]:
    """Write our log from INFO on to `stream` (standard error), one line for each record, while the block runs."""
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(EventFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _event(event: str, **fields: Value) -> None:
    _log.info("%s", event_line(event, **fields), extra={"is_event": True})


def _text(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else 0.0


def _bytes_by_path(stats: TierStats) -> dict[str, int]:
    return {
        "bytes_into_l1": stats.l1.bytes_in,
        "bytes_into_l2": stats.l2.bytes_in,
        "bytes_from_file": stats.file.bytes_read,
    }


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
