"""Streams of the fake GPUs are captured, and what was captured is replayed, with CUDA's rules."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest

from fake_ggml_gpu.captures import Captures, captures
from fake_ggml_gpu.ggml import F32, SUCCESS, Ggml
from fake_ggml_gpu.process import GpuSession, on_fake_gpus

N = 64
BYTES = 4 * N
UNJOINED, ISOLATION, CAPTURED_EVENT, INVALIDATED, ILLEGAL_STATE, INVALID_HANDLE = 904, 905, 907, 901, 401, 400


def add_graph(ggml: Ggml) -> tuple[int, list[int]]:
    """A graph of one node, and its tensors: two terms and their sum."""
    context = ggml.context()
    terms = [ggml.new_tensor_1d(context, F32, N) for _ in range(2)]
    total = ggml.add(context, *terms)
    ggml.allocate(context, "FAKE0")
    graph = ggml.new_graph(ggml.context())
    ggml.build_forward_expand(graph, total)
    return graph, [*terms, total]


def put(ggml: Ggml, tensor: int, value: float) -> None:
    ggml.tensor_set(tensor, np.full(N, value, np.float32).ctypes.data, 0, BYTES)


def read(ggml: Ggml, tensor: int) -> np.ndarray:
    found = np.zeros(N, np.float32)
    ggml.tensor_get(tensor, found.ctypes.data, 0, BYTES)
    return found


def join(ggml: Ggml, calls: Captures, event: int, streams: list[int]) -> None:
    """Begin a capture that `streams` are part of."""
    assert calls.begin() == 0
    assert calls.record(event) == 0
    for stream in streams:
        ggml.event_wait(stream, event)


def join_back(ggml: Ggml, calls: Captures, event: int, stream: int) -> None:
    ggml.event_record(event, stream)
    assert calls.wait(event) == 0


@pytest.mark.parametrize("jitter_us", [0, 500])
@on_fake_gpus
def test_two_streams_are_captured_and_replayed(gpus: GpuSession, jitter_us):
    """Each replay reads what memory and pinned memory hold then; nothing runs at capture."""
    gpus.fakes.switch(jitter_us=jitter_us)
    with captures(gpus) as calls, Ggml(gpus.engine) as ggml:
        one, two, event = ggml.stream("FAKE0"), ggml.stream("FAKE0"), ggml.event("FAKE0")
        done = ggml.event("FAKE0")
        [graph, tensors], [second, others] = add_graph(ggml), add_graph(ggml)
        source, target = ggml.pinned(N), ggml.pinned(N)
        before = gpus.fakes.devices[0].counters()
        join(ggml, calls, event, [one, two])
        ggml.tensor_set_async(one, tensors[0], source.ctypes.data, 0, BYTES)
        assert ggml.graph_compute_async(one, graph) == SUCCESS  # beside the other stream's
        assert ggml.graph_compute_async(two, second) == SUCCESS
        ggml.event_record(done, one)
        ggml.event_wait(two, done)
        ggml.tensor_copy_async(two, two, tensors[2], others[0])
        ggml.tensor_get_async(two, others[0], target.ctypes.data, 0, BYTES)
        join_back(ggml, calls, done, two)
        code, captured = calls.end()
        assert code == 0
        code, made = calls.instantiate(captured)
        assert code == 0
        target[:] = -1
        assert calls.destroy(captured) == 0
        for round_ in range(1, 4):
            put(ggml, tensors[1], 10 * round_)
            put(ggml, others[0], round_)
            put(ggml, others[1], 5)
            source[:] = round_
            assert (target == (11 * (round_ - 1) if round_ > 1 else -1)).all()
            assert calls.launch(made) == 0
            assert calls.record(done) == 0
            ggml.event_synchronize(done)
            assert (target == 11 * round_).all(), (round_, target)
            assert (read(ggml, others[2]) == round_ + 5).all()
        assert calls.destroy_made(made) == 0
        assert calls.destroy_made(made) == calls.launch(made) == INVALID_HANDLE
        after = gpus.fakes.devices[0].counters()
        counted = {name: after[name] - before[name] for name in ("captures", "graph_launches", "live_graphs")}
        assert counted == {"captures": 1, "graph_launches": 3, "live_graphs": 0}


@pytest.mark.parametrize("ordered", [False, True])
@on_fake_gpus
def test_races_between_branches_and_behind_a_launch(gpus: GpuSession, ordered):
    with captures(gpus) as calls, Ggml(gpus.engine) as ggml:
        one, two, event = ggml.stream("FAKE0"), ggml.stream("FAKE0"), ggml.event("FAKE0")
        back = ggml.event("FAKE0")
        [first, second, third] = ggml.vectors("FAKE0", 3, N)
        join(ggml, calls, event, [one, two])
        ggml.tensor_copy_async(one, one, first, second)
        ggml.event_record(back, one)
        if ordered:
            ggml.event_wait(two, back)
        ggml.tensor_copy_async(two, two, second, third)
        assert calls.wait(back) == 0
        join_back(ggml, calls, event, two)
        _, captured = calls.end()
        _, made = calls.instantiate(captured)
        assert gpus.fakes.take_faults() == ""
        for _ in range(2):
            assert calls.launch(made) == 0
            gpus.fakes.synchronize()
            assert ("nothing orders them" in gpus.fakes.take_faults()) == (not ordered)
        assert calls.launch(made) == 0
        assert calls.record(event) == 0
        if ordered:
            ggml.event_wait(one, event)
        ggml.tensor_copy_async(one, one, first, third)
        gpus.fakes.synchronize()
        assert ("nothing orders them" in gpus.fakes.take_faults()) == (not ordered)
        assert calls.destroy(captured) == calls.destroy_made(made) == 0


MISUSES = ["wait outside", "query", "synchronize the event", "synchronize", "begin", "unjoined", "set"]


@pytest.mark.parametrize("misuse", MISUSES)
@on_fake_gpus
def test_misuse_is_found(gpus: GpuSession, misuse):
    with captures(gpus) as calls, Ggml(gpus.engine) as ggml:
        one, event, outside = ggml.stream("FAKE0"), ggml.event("FAKE0"), ggml.event("FAKE0")
        back = ggml.event("FAKE0")
        [tensor] = ggml.vectors("FAKE0", 1, N)
        ggml.event_record(outside, one)
        join(ggml, calls, event, [one])
        ends, complaint = INVALIDATED, "of stream capture"
        match misuse:
            case "wait outside":
                assert calls.wait(outside) == ISOLATION
                assert calls.record(back) == INVALIDATED
                complaint = ""
            case "query":
                assert calls.query(event) == CAPTURED_EVENT
                ends, complaint = 0, ""
            case "synchronize the event":
                ggml.event_synchronize(event)
            case "synchronize":
                ggml.synchronize(one)
            case "begin":
                assert calls.begin() == ILLEGAL_STATE
                complaint = ""
            case "unjoined":
                ends, complaint = UNJOINED, ""
            case "set":
                put(ggml, tensor, 1)
                ends, complaint = 0, "by the thread that captures"
        if ends == 0:
            join_back(ggml, calls, back, one)
        faults = gpus.fakes.take_faults()
        assert complaint in faults
        assert bool(complaint) == bool(faults)
        code, captured = calls.end()
        assert code == ends
        assert (captured is None) == (ends != 0)
        if captured:
            assert calls.destroy(captured) == 0
        put(ggml, tensor, 2)  # the streams are free again
        copy = ct.create_string_buffer(BYTES)
        ggml.tensor_get_async(one, tensor, ct.addressof(copy), 0, BYTES)
        ggml.synchronize(one)
        assert (np.frombuffer(copy, np.float32) == 2).all()
        assert calls.wait(event) == CAPTURED_EVENT


@pytest.mark.parametrize("call", ["capture", "instantiate"])
@on_fake_gpus
def test_calls_that_fail(gpus: GpuSession, call):
    with captures(gpus) as calls:
        gpus.fakes.fail(call, 2)
        for works in (True, False, True):
            code = calls.begin()
            if call == "capture":
                assert (code == 0) == works
            if code:
                assert calls.end()[0] == ILLEGAL_STATE
                continue
            _, captured = calls.end()
            code, made = calls.instantiate(captured)
            assert (code == 0) == (works or call == "capture")
            assert calls.destroy(captured) == 0
            assert (calls.destroy_made(made) == 0) == (code == 0)
