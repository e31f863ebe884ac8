"""Runs the graphs of this folder: on the CPU device with the experts' real bytes, or on the proxy."""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from functools import cache
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from engine_runs.native_build import build_library
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.tiers.model.table import ExpertTable

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
NOT_RESTORED = 102  # the status of run.cpp for a graph that came back changed
THROWN = 103  # its status for a graph that ended in an exception

_N_LAYERS = 2
_MAX_VALUES = 1 << 18


class _Request(ct.Structure):
    """graph_request of run.cpp."""

    _fields_ = (
        ("name", ct.c_char_p),
        ("device", ct.c_void_p),
        ("experts_type", ct.c_void_p),
        ("scheduled", ct.c_int32),
        ("matrix_names", ct.POINTER(ct.c_char_p)),
        ("matrix_types", ct.POINTER(ct.c_int32)),
        ("matrix_data", ct.POINTER(ct.c_char_p)),
        ("n", ct.c_int64),
        ("n_experts", ct.c_int64),
        ("n_used", ct.c_int64),
        ("n_tokens", ct.c_int64),
        ("seed", ct.c_uint32),
        ("x", ct.c_void_p),
        ("choice", ct.c_void_p),
        ("bias", ct.c_void_p),
    )


@dataclass(frozen=True)
class GraphResult:
    """What came of a graph on the proxy: its status, its outputs' bytes, and the error that was left."""

    status: int
    outputs: bytes
    message: str
    cause: BaseException | None


class ExpertGraphs:
    """The graphs over the first layers' experts of one model file; all matrices are square."""

    def __init__(self, model: Path) -> None:
        """Load the library and read the experts."""
        self._library = ct.CDLL(str(build_library("expert_graphs", SOURCES)))
        self._library.expert_graph_name.restype = ct.c_char_p
        table = ExpertTable.from_gguf(model)
        layer, whole = table.layers[0], model.read_bytes()
        matrices = [matrix for layer in table.layers[:_N_LAYERS] for matrix in layer.matrices]
        data = [whole[m.file_offset : m.file_offset + m.expert_bytes * layer.n_experts] for m in matrices]
        self._names = (ct.c_char_p * len(matrices))(*[matrix.name.encode() for matrix in matrices])
        self._data = (ct.c_char_p * len(matrices))(*data)
        self._types = (ct.c_int32 * len(layer.matrices))(*[matrix.ggml_type for matrix in layer.matrices])
        self._n, self._n_experts, self._n_used = layer.matrices[0].ne0, layer.n_experts, table.top_k
        self.on_cpu = cache(self._on_cpu)

    @property
    def names(self) -> list[str]:
        """The names of all graphs."""
        names = map(self._library.expert_graph_name, count())
        return [name.decode() for name in takewhile(lambda name: name is not None, names)]

    def on_proxy(
        self, binding: TierBinding, graph: str, n_tokens: int, *, scheduled: bool = False, seed: int = 0
    ) -> GraphResult:
        """Run a graph on the proxy, by itself or through the engine's scheduler."""
        binding.take_error()
        binding.begin_load()
        try:
            status, outputs = self._run(
                graph, n_tokens, binding.device, binding.buffer_type, scheduled=scheduled, seed=seed
            )
        finally:
            binding.end_load()
        return GraphResult(status, outputs, *binding.take_error())

    def _on_cpu(self, graph: str, n_tokens: int, *, seed: int = 0) -> bytes:
        """Return the outputs of a graph on the CPU device."""
        status, outputs = self._run(graph, n_tokens, seed=seed)
        assert status == 0, f"{graph}: status {status} on the CPU device"
        return outputs

    def _run(
        self,
        graph: str,
        n_tokens: int,
        device: int | None = None,
        experts_type: int | None = None,
        *,
        scheduled: bool = False,
        seed: int = 0,
    ) -> tuple[int, bytes]:
        random = np.random.default_rng(n_tokens)
        x = random.standard_normal((n_tokens, self._n), np.float32)
        bias = random.standard_normal((self._n_experts, self._n), np.float32)
        orders = [random.permutation(self._n_experts) for _ in range(n_tokens)]
        choice = np.array(orders, np.int32).reshape(n_tokens, self._n_experts)
        request = _Request(
            name=graph.encode(),
            device=device,
            experts_type=experts_type,
            scheduled=scheduled,
            matrix_names=self._names,
            matrix_types=self._types,
            matrix_data=self._data,
            n=self._n,
            n_experts=self._n_experts,
            n_used=self._n_used,
            n_tokens=n_tokens,
            seed=seed,
            x=x.ctypes.data,
            choice=choice.ctypes.data,
            bias=bias.ctypes.data,
        )
        out, n_out = np.full(_MAX_VALUES, np.nan, np.float32), ct.c_int64(0)
        status = self._library.run_expert_graph(
            ct.byref(request), ct.c_void_p(out.ctypes.data), ct.c_int64(len(out)), ct.byref(n_out)
        )
        return status, out[: n_out.value].tobytes()
