"""What the engine's scheduler copies between devices: it says so in its log, of any backend, where it is asked to."""

from __future__ import annotations

import ctypes as ct
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from expertier.engine_adapter.llama_cpp import LoadedEngine

_VARIABLE = "GGML_SCHED_DEBUG"
_SPLIT = re.compile(r"## SPLIT #(\d+): (\S+) # (\d+) inputs(.*)")
_INPUT = re.compile(r"\[(.+?) \(\s*(\d+[KM]?)\s*\)\]")
_LAYER = re.compile(r"-\d+$")
_LOG = ct.CFUNCTYPE(None, ct.c_int, ct.c_char_p, ct.c_void_p)


class SplitOfGraph(NamedTuple):
    """A piece of a graph that one device computes, and the tensors that are copied to it: names and sizes as logged.

    Names are without the number of the layer, as two runs may split the layers at another one, and devices are numbered
    as they come, as ours have other names than those that they wrap (`logged_device`).
    """

    number: int
    device: int
    inputs: tuple[tuple[str, str], ...]
    logged_device: str

    @property
    def names(self) -> tuple[int, int, tuple[str, ...]]:
        """The same without sizes."""
        return self.number, self.device, tuple(name for name, _ in self.inputs)


@contextmanager
def logged_splits(engine: LoadedEngine) -> Iterator[list[SplitOfGraph]]:
    """Collect the splits of the graphs that contexts opened inside the block lay out; complete when it ends."""
    said: list[bytes] = []
    callback = _LOG(lambda _level, text, _data: said.append(text))
    found: list[SplitOfGraph] = []
    os.environ[_VARIABLE] = "1"
    engine.symbol("llama_log_set", None, _LOG, ct.c_void_p)(callback, None)
    try:
        yield found
    finally:
        engine.keep_log()
        del os.environ[_VARIABLE]
        found += splits_in(b"".join(said).decode(errors="replace"))


def splits_in(log: str) -> list[SplitOfGraph]:
    """Read the splits out of a log, in order."""
    found: list[SplitOfGraph] = []
    devices: dict[str, int] = {}
    for number, device, n_inputs, rest in _SPLIT.findall(log):
        inputs = tuple((_LAYER.sub("", name), size) for name, size in _INPUT.findall(rest))
        assert len(inputs) == int(n_inputs), f"the log names {inputs} of {n_inputs} inputs: {rest}"
        found.append(SplitOfGraph(int(number), devices.setdefault(device, len(devices)), inputs, device))
    return found
