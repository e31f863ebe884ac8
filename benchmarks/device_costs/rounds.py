"""Times ways of doing the same in turns, and says how their rounds differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def timed(rounds: int, *ways: Callable[[], None]) -> list[list[float]]:
    """Return the seconds of each round of each way; the ways take turns, and the first turn does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, found in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if turn:
                found.append(time.perf_counter() - start)
    return times


def spread(values: list[float], scale: float) -> dict[str, float]:
    """Return median, smallest and largest, scaled."""
    scaled = sorted(value * scale for value in values)
    return {"median": statistics.median(scaled), "min": scaled[0], "max": scaled[-1]}


def ratios(times: list[list[float]]) -> dict[str, float]:
    """Return the second way's time over the first one's, round by round."""
    return spread([second / first for first, second in zip(*times, strict=True)], 1)
