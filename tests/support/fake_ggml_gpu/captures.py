"""The driver calls that capture streams of a fake device, as a test makes them."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_ggml_gpu.process import GpuSession

_P = ct.c_void_p
_RELAXED = 2
_CALLS: dict[str, tuple[int, tuple[Any, ...]]] = {  # index of fake_gpu_open_device_lookup, arguments
    "stream_wait": (1, (_P, _P, ct.c_uint32)),
    "event_record": (2, (_P, _P)),
    "event_query": (7, (_P,)),
    "capture_begin": (10, (_P, ct.c_int)),
    "capture_end": (11, (_P, ct.POINTER(_P))),
    "graph_instantiate": (12, (ct.POINTER(_P), _P, ct.c_ulonglong)),
    "graph_launch": (13, (_P, _P)),
    "graph_exec_destroy": (14, (_P,)),
    "graph_destroy": (15, (_P,)),
}


class Captures:
    """The calls, on the stream that came with them; each returns the driver's code, 0 for success."""

    def __init__(self, given: ct.Array[ct.c_void_p]) -> None:
        self.stream = given[4]
        self._calls = {
            name: ct.CFUNCTYPE(ct.c_int32, *arguments)(given[index])
            for name, (index, arguments) in _CALLS.items()
        }

    def begin(self) -> int:
        """Begin a capture."""
        return self._calls["capture_begin"](self.stream, _RELAXED)

    def end(self) -> tuple[int, int | None]:
        """End it; the code and the graph."""
        graph = _P()
        return self._calls["capture_end"](self.stream, ct.byref(graph)), graph.value

    def instantiate(self, graph: int | None) -> tuple[int, int | None]:
        """Make a graph one that can be launched; the code and that."""
        made = _P()
        return self._calls["graph_instantiate"](ct.byref(made), graph, 0), made.value

    def launch(self, made: int | None) -> int:
        """Launch it."""
        return self._calls["graph_launch"](made, self.stream)

    def destroy(self, graph: int | None) -> int:
        """Destroy what `end` gave."""
        return self._calls["graph_destroy"](graph)

    def destroy_made(self, made: int | None) -> int:
        """Destroy what `instantiate` gave."""
        return self._calls["graph_exec_destroy"](made)

    def record(self, event: int) -> int:
        """Record an event of ggml's."""
        return self._calls["event_record"](_context_of(event), self.stream)

    def wait(self, event: int) -> int:
        """Have the stream wait for an event of ggml's."""
        return self._calls["stream_wait"](self.stream, _context_of(event), 0)

    def query(self, event: int) -> int:
        """Ask whether an event of ggml's is done."""
        return self._calls["event_query"](_context_of(event))


def _context_of(event: int) -> int:
    """The driver's event: the second member of ggml_backend_event."""
    return (ct.c_void_p * 2).from_address(event)[1] or 0


@contextmanager
def captures(gpus: GpuSession, device: int = 0) -> Iterator[Captures]:
    """The calls with a new stream of a device."""
    with gpus.fakes.driver_calls(device) as given:
        yield Captures(given)
