"""The events of a tool under `expertier exec`: the same lines as of serve and run, at the same moments."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from engine_runs.tiered_runs import write_small_model
from limits.waits import joined
from servers.tool_server import EXEC, HALF_BUDGET, PROMPTS, ToolServer, events_of

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def command(llama_cpp: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A llama-server through the tiers."""
    model = write_small_model(tmp_path_factory.mktemp("events"), "Q4_K+Q6_K")
    return (*EXEC, llama_cpp / "build" / "bin" / "llama-server", "-m", model)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_events_from_the_start_to_the_end(command: tuple[object, ...], end: signal.Signals) -> None:
    with ToolServer(*command, env=HALF_BUDGET) as server:
        (enabled,) = events_of(server.read(), "enabled")
        assert enabled["limited_by"] == "budget"
        assert 0 < int(enabled["slots"]) == int(enabled["requested_slots"]) < int(enabled["experts"])
        assert int(enabled["l1_bytes"]) == pytest.approx(float(HALF_BUDGET["MOE_EXPERT_CACHE_MIB"]) * 2**20)
        assert int(enabled["l2_bytes"]) == 0
        expected = server.complete(PROMPTS[0])
        assert events_of(server.read(), "summary") == []
        server.process.send_signal(signal.SIGUSR1)
        server.wait_until(lambda: len(events_of(server.read(), "summary")) == 1)
        assert server.complete(PROMPTS[0]) == expected
        server.end(end)
    assert server.process.returncode == 0, server.said
    assert len(events_of(server.said, "first_use")) == 1
    first, last = events_of(server.said, "summary")
    for counter in ("hits", "misses", "bytes_from_file"):
        assert int(last[counter]) == int(first[counter]) + int(last[f"turn_{counter}"]) > int(first[counter])
    for name in ("hits", "misses", "evictions", "hit_rate", "bytes_into_l1", "turn_hit_rate"):
        assert float(last[name]) > 0, name


def test_signals_do_not_disturb_the_tool(command: tuple[object, ...]) -> None:
    """Not even hundreds of them while it loads, computes and waits."""
    with ToolServer(*command, env=HALF_BUDGET) as server:
        expected = server.complete(PROMPTS[0])
        found: list[str] = []
        asking = threading.Thread(
            target=lambda: found.extend(server.complete(PROMPTS[0]) for _ in range(8)), daemon=True
        )
        asking.start()
        n_sent = 0
        while asking.is_alive():
            server.process.send_signal(signal.SIGUSR1)
            n_sent += 1
            asking.join(0.002)  # a pause: between two signals
        assert n_sent > 20
        assert found == [expected] * 8
        assert server.complete(PROMPTS[0]) == expected
    assert server.process.returncode == 0, server.said


def test_a_second_interrupt_ends_the_tool_in_the_middle(command: tuple[object, ...]) -> None:
    """The tool calls exit() in its signal handler then; it still ends, whatever its threads are doing."""
    with ToolServer(*command, env=HALF_BUDGET) as server:

        def ask() -> None:
            with contextlib.suppress(OSError):  # the server ends before it answers
                server.answer(PROMPTS[0], 400)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        server.wait_until(lambda: "processing task" in server.read())
        for _ in range(20):  # signals that come close together are one
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGINT)
                asking.join(0.02)  # a pause: between two signals
        server.process.wait(20)
        joined(asking)


def test_a_refused_model_is_said_to_be_disabled(command: tuple[object, ...]) -> None:
    ended = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "MOE_EXPERT_CACHE_MIB": "0.01"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    (disabled,) = events_of(ended.stderr, "disabled")
    assert disabled["model"] == Path(str(command[-1])).name
    assert "at least" in disabled["reason"]
