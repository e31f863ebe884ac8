"""One line an event: its form, what it says, and how seldom."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import threading

import pytest

from expertier.engine_adapter.telemetry.signals import on_signal
from expertier.engine_adapter.telemetry.telemetry import (
    Telemetry,
    event_line,
    limited_by,
    requested_slots,
    say_disabled,
    show_events,
)
from expertier.hip import open_device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from model_files.gguf_files import write_model


@pytest.fixture
def table(tmp_path):
    return write_model(tmp_path / "m.gguf").table


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(line))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.5, "0.500"),
        ("lfu-decay", "lfu-decay"),
        ("a b", '"a b"'),
        ("", '""'),
        ('say "no"', '"say \\"no\\""'),
        ("two\nlines", '"two\\nlines"'),
        ("k=v", '"k=v"'),
        ("Müller.gguf", "Müller.gguf"),
    ],
)
def test_values_are_quoted_where_they_need_it(value, text):
    assert event_line("x", key=value) == f"event=x key={text}"


def test_other_messages_of_ours_have_the_same_form():
    out = io.StringIO()
    with show_events(out):
        logging.getLogger("expertier.tiers.manager").warning("%s: too small", "m.gguf")
        logging.getLogger("expertier.tiers.manager").debug("not shown")
        say_disabled("m.gguf", "no room")
    logging.getLogger("expertier").info("not shown any more")
    assert out.getvalue().splitlines() == [
        'event=warning source=expertier.tiers.manager message="m.gguf: too small"',
        'event=disabled model=m.gguf reason="no room"',
    ]


def test_the_events_of_a_model(table):
    out = io.StringIO()
    config = TierConfig(expert_cache_bytes=table.expert_bytes_total // 2 + 4096)
    with show_events(out), TierManager(table, device=open_device("host"), config=config) as manager:
        telemetry = Telemetry(TierSet.of(manager), config)
        telemetry.enabled()
        for expert in (0, 1, 0):
            manager.acquire(0, [expert]).release()
            telemetry.note_fill(None)
        telemetry.note_fill(OSError(5, "Input/output error"))
        telemetry.summary()
        manager.acquire(0, [0]).release()
        telemetry.summary()
        slots = sum(manager.slots)
    enabled, first, failed, one, two = map(fields, out.getvalue().splitlines())
    assert enabled["event"] == "enabled"
    assert enabled["slots"] == enabled["requested_slots"] == str(slots)
    assert enabled["limited_by"] == "budget"
    assert int(enabled["l1_bytes"]) == config.expert_cache_bytes
    assert first == {"event": "first_use", "model": "m.gguf"}
    assert failed["reason"] == "OSError: [Errno 5] Input/output error"
    assert (one["hits"], one["misses"], one["hit_rate"]) == ("1", "2", "0.333")
    assert (one["turn_hits"], one["turn_misses"]) == ("1", "2")
    assert int(one["bytes_from_file"]) == int(one["turn_bytes_from_file"]) > 0
    assert (two["hits"], two["misses"], two["hit_rate"]) == ("2", "2", "0.500")
    assert (two["turn_hits"], two["turn_misses"], two["turn_hit_rate"]) == ("1", "0", "1.000")
    assert two["turn_bytes_from_file"] == "0"


@pytest.mark.parametrize(
    ("config", "available", "limit"),
    [
        (TierConfig(expert_cache_bytes=1 << 30), 1 << 40, "slots"),
        (TierConfig(), 1 << 40, "budget"),
        (TierConfig(host_pool_percent=100), 1 << 40, "slots"),
        (TierConfig(host_pool_percent=100), 20_000, "ram"),
    ],
)
def test_what_limits_the_slots(table: ExpertTable, monkeypatch, config, available, limit):
    monkeypatch.setattr("expertier.tiers.assemble.available_bytes", lambda: available)
    with TierManager(table, device=open_device("host"), config=config) as manager:
        requested = requested_slots(manager, config)
        assert limited_by(manager, requested) == limit
        assert (requested > sum(manager.slots)) is (limit == "ram")


def test_signals_are_answered_on_another_thread():
    answered = threading.Semaphore(0)
    names = []

    def answer():
        names.append(threading.current_thread().name)
        answered.release()

    before = signal.getsignal(signal.SIGUSR1)
    with on_signal(signal.SIGUSR1, answer):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert answered.acquire(timeout=5)
    assert names == ["expertier-SIGUSR1"] * 2
    assert signal.getsignal(signal.SIGUSR1) is before
    assert "expertier-SIGUSR1" not in [thread.name for thread in threading.enumerate()]
