"""The predicting kernel against plain numbers: all forms of routers, what it chooses, and what it leaves alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.memory import PinnedBuffer
from expertier.hip.fake import FakeLibraries
from expertier.hip.kernels.cache import compiled, kernel_source
from expertier.hip.kernels.compiler import RuntimeCompiler
from expertier.hip.kernels.module import Kernel, KernelModule

F32 = npt.NDArray[np.float32]

_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
_CANDIDATES = 8
_CHOSEN, _PREDICTED = 2, 16  # words of the mailbox
_EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """One prediction; experts that are in `slots` are there."""

    kind: str = "F32"
    n_tokens: int = 1
    n_hidden: int = 96
    n_experts: int = 24
    n_used: int = 4
    has_norm: bool = True
    has_bias: bool = False
    is_sigmoid: bool = False
    has_late_bias: bool = False
    n_spared: int = 2
    most: int = 2
    n_there: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Found:
    predicted: npt.NDArray[np.int32]  # [used, tokens]
    chosen: list[tuple[int, int]]
    table: npt.NDArray[np.int32]
    ticket: int
    n_done: int


@pytest.fixture
def kernel(gpu: Gpu, fake_libraries: FakeLibraries):
    vendor = gpu.driver.vendor
    compiler = RuntimeCompiler(vendor, load_compiler(vendor, gpu.driver.library, fake_libraries.environ()))
    with KernelModule(gpu, compiled(compiler, kernel_source("predict.cu"), gpu.architecture())) as module:
        yield module.function("predict")


def stored(matrix: F32, kind: str) -> tuple[bytes, F32]:
    """A matrix as the kernel reads it, and its values then."""
    if kind == "F16":
        half = matrix.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    if kind == "BF16":
        high = (np.ascontiguousarray(matrix).view(np.uint32) >> 16).astype(np.uint16)
        return high.tobytes(), (high.astype(np.uint32) << 16).view(np.float32)
    return matrix.tobytes(), matrix


def run(gpu: Gpu, kernel: Kernel, case: Case) -> tuple[Found, F32, npt.NDArray[np.int32], list[int]]:
    """Launch once; returns what came, the scores by NumPy [tokens, experts], the table before, and the candidates."""
    rng = np.random.default_rng(case.seed)
    states = rng.standard_normal((case.n_tokens, case.n_hidden)).astype(np.float32)
    matrix, values = stored(
        rng.standard_normal((case.n_experts, case.n_hidden)).astype(np.float32), case.kind
    )
    norm = rng.uniform(0.5, 2, case.n_hidden).astype(np.float32)
    bias, late_bias = rng.standard_normal((2, case.n_experts)).astype(np.float32)
    table = np.full(case.n_experts, -1, np.int32)
    there = rng.permutation(case.n_experts)[: case.n_there]
    table[there] = np.arange(case.n_there)
    candidates = [*there[:_CANDIDATES].tolist()]
    parts = {
        "states": states.tobytes(), "matrix": matrix, "norm": norm.tobytes(), "bias": bias.tobytes(),
        "late": late_bias.tobytes(), "scores": bytes(case.n_tokens * case.n_experts * 4), "done": bytes(4),
        "table": table.tobytes(), "mailbox": bytes(512), "ticket": np.uint32(77).tobytes(),
        "launch_params": np.array([len(candidates), *candidates], np.int32).tobytes(),
    }  # fmt: skip
    at, size = {}, 0
    for name, content in parts.items():
        at[name] = size
        size += -(-len(content) // 64) * 64
    with PinnedBuffer(gpu, size) as memory:
        bytes_ = memory.array()
        for name, content in parts.items():
            bytes_[at[name] : at[name] + len(content)] = np.frombuffer(content, np.uint8)

        def address(name: str, has: bool = True) -> ctypes.c_void_p:
            return ctypes.c_void_p(memory.device_address() + at[name] if has else None)

        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        arguments = [
            address("states"), u32(case.n_hidden), u32(case.n_tokens), address("matrix"),
            u64(len(matrix) // case.n_experts), u32(_TYPES[case.kind]), address("norm", case.has_norm),
            ctypes.c_float(_EPSILON), address("bias", case.has_bias), u32(case.is_sigmoid),
            address("late", case.has_late_bias), u32(case.n_used), u32(case.n_spared), address("ticket"),
            address("launch_params"), u32(case.most), address("scores"), address("done"), address("table"),
            address("mailbox"),
        ]  # fmt: skip
        kernel.launch((case.n_experts, 1), 64, arguments)
        gpu.synchronize()

        def ints(name: str, n: int) -> npt.NDArray[np.int32]:
            return bytes_[at[name] : at[name] + 4 * n].view(np.int32).copy()

        mailbox = ints("mailbox", 128)
        found = Found(
            mailbox[_PREDICTED : _PREDICTED + case.n_used * case.n_tokens].reshape(
                case.n_used, case.n_tokens
            ),
            [(int(mailbox[_CHOSEN + 2 * i]), int(mailbox[_CHOSEN + 2 * i + 1])) for i in range(mailbox[1])],
            ints("table", case.n_experts),
            int(mailbox[0]),
            int(ints("done", 1)[0]),
        )
    wide = states.astype(np.float64)
    if case.has_norm:
        wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + _EPSILON) * norm
    scores = wide @ values.T
    if case.has_bias:
        scores = scores + bias
    if case.is_sigmoid:
        scores = 1 / (1 + np.exp(-scores))
    if case.has_late_bias:
        scores = scores + late_bias
    return found, scores, table, candidates


_BASE = Case()
CASES = [
    _BASE,
    replace(_BASE, kind="F16", n_tokens=3, seed=1),
    replace(_BASE, kind="BF16", has_norm=False, seed=2),
    replace(_BASE, has_bias=True, n_tokens=8, seed=3),
    replace(_BASE, is_sigmoid=True, has_late_bias=True, seed=4),
    replace(_BASE, n_experts=1, n_used=1, n_there=0, seed=5),
    replace(_BASE, n_hidden=33, n_there=2, most=4, seed=6),
    replace(_BASE, n_there=24, seed=7),
    replace(_BASE, n_spared=20, n_there=12, seed=8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case.seed}")
def test_it_does_what_the_engine_s_router_would(gpu: Gpu, kernel: Kernel, case: Case) -> None:
    found, scores, before, candidates = run(gpu, kernel, case)
    assert found.ticket == 77
    assert found.n_done == 0, "the next launch counts from 0"
    ranked = np.argsort(-scores, axis=1, kind="stable")
    assert (found.predicted == ranked[:, : case.n_used].T).all()

    spared = set(ranked[:, : case.n_used + case.n_spared].ravel().tolist())
    free = iter([i for i, expert in enumerate(candidates) if expert not in spared])
    wanted = [int(expert) for expert in dict.fromkeys(found.predicted.ravel().tolist()) if before[expert] < 0]
    expected = list(zip(wanted[: case.most], free, strict=False))
    assert found.chosen == expected
    after = before.copy()
    for _, candidate in expected:
        after[candidates[candidate]] = -1
    assert (found.table == after).all()
