"""Every wait in the tests has a limit, and nothing is shown by a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from limits.unlimited_waits import find

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "line",
    [
        "thread.join()",
        "threads[0].join(timeout=None)",
        "event.wait()",
        "fence.after(stream).wait()",
        "queue.get()",
        "child.communicate()",
        "child.communicate(timeout=None)",
        "pool.submit(f, 1).result()",
        "lock.acquire()",
        "pool.map(f, range(3))",
        "as_completed(found)",
        "subprocess.run(command, check=True)",
        "subprocess.check_output(command)",
        "urllib.request.urlopen(url)",
        "socket.create_connection(address)",
        "openai.OpenAI(base_url=url)",
        "os.waitpid(pid, 0)",
        "with subprocess.Popen(command) as child: pass",
        "time.sleep(0.01)",
        "thread.join(0.05)",
        "event.wait(timeout=0.01)",
        "threading.Thread(target=f)",
    ],
)
def test_what_waits_for_ever_or_shows_nothing_is_found(line: str) -> None:
    assert [found.line for found in find(f"x = 1\n{line}\n")] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "thread.join(30)",
        "' '.join(words)",
        "event.wait(PATIENCE_S)",
        "settings.get('name')",
        "queue.get(timeout=30)",
        "lock.acquire(timeout=30)",
        "tiers.acquire(0, [1])",
        "child.communicate(timeout=30)",
        "subprocess.run(command, timeout=30)",
        "subprocess.run(command, **options)",
        "urlopen(url, timeout=5)",
        "numbers.map(f)",
        "threading.Thread(target=f, daemon=True)",
        "fence.wait()  # no limit: the device's own wait",
        "time.sleep(5)  # a pause: what is interrupted",
    ],
)
def test_what_has_a_limit_is_left_alone(line: str) -> None:
    assert find(line) == []


def test_no_test_waits_for_ever_or_proves_by_a_pause() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{each.line}: {each.what}"
        for path in sorted(TESTS.rglob("*.py"))
        for each in find(path.read_text())
    ]
    assert not found, "\n".join(found)
