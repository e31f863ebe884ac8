"""The fake GPUs are asynchronous, keep their memory to themselves, and tell what a real one would not forgive."""

from __future__ import annotations

import ctypes as ct
import faulthandler
import os
import signal

import numpy as np
import pytest

from fake_ggml_gpu.ggml import F32, FAILED, SUCCESS, Ggml
from fake_ggml_gpu.process import GpuSession, on_fake_gpus

N = 64
BYTES = 4 * N
KIB = 1024


def filled(value: float) -> np.ndarray:
    return np.full(N, value, np.float32)


def add_graph(ggml: Ggml, device: str) -> tuple[int, list[int]]:
    """A graph of one node on a device, and its tensors: two terms, one and two, and their sum."""
    context = ggml.context()
    terms = [ggml.new_tensor_1d(context, F32, N) for _ in range(2)]
    total = ggml.add(context, *terms)
    ggml.allocate(context, device)
    for value, term in enumerate(terms, 1):
        ggml.tensor_set(term, filled(value).ctypes.data, 0, BYTES)
    graph = ggml.new_graph(ggml.context())
    ggml.build_forward_expand(graph, total)
    return graph, [*terms, total]


def read(ggml: Ggml, tensor: int) -> np.ndarray:
    found = filled(0)
    ggml.tensor_get(tensor, found.ctypes.data, 0, BYTES)
    return found


@on_fake_gpus
def test_what_the_engine_sees(gpus: GpuSession):
    devices = {device["name"]: device for device in gpus.engine.devices()}
    assert {"CPU", "FAKE0", "FAKE1"} <= set(devices)
    with Ggml(gpus.engine) as ggml:
        own = [ggml.dev_buffer_type(ggml.device(name)) for name in ("FAKE0", "FAKE1")]
        pinned = ggml.dev_host_buffer_type(ggml.device("FAKE1"))
        assert not ggml.buft_is_host(own[0])
        assert ggml.buft_is_host(pinned)
        for i in range(2):
            taken = [ggml.dev_supports_buft(ggml.device(f"FAKE{i}"), kind) for kind in (*own, pinned)]
            assert taken == [i == 0, i == 1, False]


@on_fake_gpus
def test_queued_copies_read_when_they_are_done(gpus: GpuSession):
    with Ggml(gpus.engine) as ggml:
        stream, [tensor] = ggml.stream("FAKE0"), ggml.vectors("FAKE0", 1, N)
        source, target = ggml.pinned(N), ggml.pinned(N)
        source[:], target[:] = 1, 0
        with gpus.fakes.held():
            ggml.tensor_set_async(stream, tensor, source.ctypes.data, 0, BYTES)
            ggml.tensor_get_async(stream, tensor, target.ctypes.data, 0, BYTES)
            source[:] = 2
            assert not target.any()
        ggml.synchronize(stream)
        assert (target == 2).all(), target
        counted = gpus.fakes.devices[0].counters()
        assert counted["async_sets"] > 0
        assert counted["async_gets"] > 0


@pytest.mark.parametrize("at_call", [False, True])
@on_fake_gpus
def test_copies_of_other_memory_may_be_over_at_once(gpus: GpuSession, at_call):
    gpus.fakes.switch(pageable_at_call=at_call)
    with Ggml(gpus.engine) as ggml:
        stream, [tensor] = ggml.stream("FAKE0"), ggml.vectors("FAKE0", 1, N)
        source, target = filled(1), filled(0)
        before = gpus.fakes.devices[0].counters()
        with gpus.fakes.held():
            ggml.tensor_set_async(stream, tensor, source.ctypes.data, 0, BYTES)
            source[:] = 2
        ggml.tensor_get_async(stream, tensor, target.ctypes.data, 0, BYTES)
        if not at_call:
            ggml.synchronize(stream)
        assert (target == (1 if at_call else 2)).all(), target
        after = gpus.fakes.devices[0].counters()
        assert after["pageable_bytes_to_device"] - before["pageable_bytes_to_device"] == BYTES
        assert after["bytes_to_device"] - before["bytes_to_device"] == BYTES
        assert after["bytes_to_host"] - before["bytes_to_host"] == BYTES


@on_fake_gpus
def test_a_graph_is_taken_as_it_is(gpus: GpuSession):
    """What becomes of its tensors after the call has no effect."""
    with Ggml(gpus.engine) as ggml:
        stream, [kept] = ggml.stream("FAKE0"), ggml.vectors("FAKE0", 1, N)
        graph, tensors = add_graph(ggml, "FAKE0")
        with gpus.fakes.held():
            assert ggml.graph_compute_async(stream, graph) == SUCCESS
            ggml.tensor_copy_async(stream, stream, tensors[-1], kept)
            for tensor in tensors:
                ct.memset(tensor, 0xFF, ggml.tensor_overhead() - 32)
        ggml.synchronize(stream)
        assert (read(ggml, kept) == 3).all()


@on_fake_gpus
def test_events_order_streams(gpus: GpuSession):
    gpus.fakes.switch(jitter_us=2000)
    with Ggml(gpus.engine) as ggml:
        first, second, event = ggml.stream("FAKE0"), ggml.stream("FAKE1"), ggml.event("FAKE0")
        [tensor], [other] = ggml.vectors("FAKE0", 1, N), ggml.vectors("FAKE0", 1, N)
        third = ggml.stream("FAKE0")
        source, target = ggml.pinned(N), ggml.pinned(N)
        for round_ in range(1, 20):
            source[:] = round_
            ggml.tensor_set_async(first, tensor, source.ctypes.data, 0, BYTES)
            ggml.event_record(event, first)
            ggml.event_wait(third, event)
            ggml.tensor_copy_async(third, third, tensor, other)
            ggml.tensor_get_async(third, other, target.ctypes.data, 0, BYTES)
            ggml.event_record(event, third)
            ggml.event_wait(second, event)  # of another device
            ggml.event_wait(first, event)
            ggml.event_synchronize(event)
            assert (target == round_).all(), (target, round_)


@on_fake_gpus
def test_an_event_that_is_freed_is_waited_for(gpus: GpuSession):
    with Ggml(gpus.engine) as ggml:
        first, second, event = ggml.stream("FAKE0"), ggml.stream("FAKE0"), ggml.event("FAKE0")
        [tensor] = ggml.vectors("FAKE0", 1, N)
        source, target = filled(5), filled(0)
        with gpus.fakes.held():
            ggml.tensor_set_async(first, tensor, source.ctypes.data, 0, BYTES)
            ggml.event_record(event, first)
            ggml.event_wait(second, event)
            ggml.free_last(event)
            ggml.tensor_get_async(second, tensor, target.ctypes.data, 0, BYTES)
        ggml.synchronize(second)
        assert (target == 5).all(), target


@pytest.mark.parametrize("between", ["FAKE0", "FAKE1"])
@on_fake_gpus
def test_copies_between_buffers(gpus: GpuSession, between):
    with Ggml(gpus.engine) as ggml:
        first, second = ggml.stream("FAKE0"), ggml.stream(between)
        [one], [two, three] = ggml.vectors("FAKE0", 1, N), ggml.vectors(between, 2, N)
        ggml.tensor_set(one, filled(7).ctypes.data, 0, BYTES)
        ggml.tensor_copy_async(first, second, one, two)
        ggml.tensor_copy_async(second, second, two, three)
        ggml.synchronize(second)
        assert (read(ggml, three) == 7).all()
        ggml.tensor_set(one, filled(8).ctypes.data, 0, BYTES)
        ggml.tensor_copy(one, two)
        assert (read(ggml, two) == 8).all()


@on_fake_gpus
def test_device_memory_has_a_limit(gpus: GpuSession):
    device = gpus.fakes.devices[1]
    device.set_memory(64 * KIB)
    try:
        with Ggml(gpus.engine) as ggml:
            kind = ggml.dev_buffer_type(ggml.device("FAKE1"))
            assert ggml.memory("FAKE1") == (64 * KIB, 64 * KIB)
            taken = ggml.buft_alloc_buffer(kind, 40 * KIB - 1)
            assert ggml.memory("FAKE1") == (24 * KIB, 64 * KIB)
            assert device.live() == {"live_buffers": 1, "live_bytes": 40 * KIB}
            assert not ggml.buft_alloc_buffer(kind, 24 * KIB + 1)
            ggml.buffer_free(taken)
            assert ggml.memory("FAKE1") == (64 * KIB, 64 * KIB)
            gpus.fakes.fail("memory", 2)
            for works in (True, False, True):
                buffer = ggml.buft_alloc_buffer(kind, KIB)
                assert bool(buffer) == works
                ggml.buffer_free(buffer)
    finally:
        device.set_memory(1 << 30)


@on_fake_gpus
def test_other_calls_that_fail(gpus: GpuSession):
    with Ggml(gpus.engine) as ggml:
        device = ggml.device("FAKE0")
        gpus.fakes.fail("stream")
        assert not ggml.dev_init(device, None)
        gpus.fakes.fail("event")
        assert not ggml.event_new(device)
        pinned = ggml.dev_host_buffer_type(device)
        gpus.fakes.fail("pinned")
        buffer = ggml.buft_alloc_buffer(pinned, KIB)  # as of the real ones: plain memory, and nobody says so
        assert ggml.buffer_get_type(buffer) not in (0, None, pinned)
        ggml.buffer_free(buffer)


@on_fake_gpus
def test_fresh_memory_is_not_zero(gpus: GpuSession):
    with Ggml(gpus.engine) as ggml:
        [tensor] = ggml.vectors("FAKE0", 1, N)
        assert np.isnan(read(ggml, tensor)).all()


@pytest.mark.parametrize("writes", [False, True])
@on_fake_gpus
def test_the_host_cannot_touch_device_memory(gpus: GpuSession, writes):
    with Ggml(gpus.engine) as ggml:
        [tensor] = ggml.vectors("FAKE0", 1, N)
        address = ggml.get_data(tensor)
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # what follows is no accident
            ct.memset(address, 0, 1) if writes else ct.string_at(address, 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)  # no limit: a child of one instruction
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV


@on_fake_gpus
def test_pinned_memory_that_is_freed_too_early(gpus: GpuSession):
    with Ggml(gpus.engine) as ggml:
        stream, [tensor] = ggml.stream("FAKE0"), ggml.vectors("FAKE0", 1, N)
        source = ggml.pinned(N)
        with gpus.fakes.held():
            ggml.tensor_set_async(stream, tensor, source.ctypes.data, 0, BYTES)
            ggml.free_last()
        ggml.synchronize(stream)
        assert "pinned memory was freed while a copy from it was queued" in gpus.fakes.take_faults()


@on_fake_gpus
def test_memory_of_another_device(gpus: GpuSession):
    with Ggml(gpus.engine) as ggml:
        stream, [tensor] = ggml.stream("FAKE0"), ggml.vectors("FAKE1", 1, N)
        ggml.tensor_set_async(stream, tensor, filled(1).ctypes.data, 0, BYTES)
        assert "in a buffer of type FAKE1" in gpus.fakes.take_faults()
        graph, _ = add_graph(ggml, "FAKE1")
        assert ggml.graph_compute_async(stream, graph) == FAILED
        assert "outside of the device's memory" in gpus.fakes.take_faults()


ORDERS = {
    "none": False,
    "event": True,
    "event before": False,
    "synchronize": True,
    "synchronize the other": False,
    "free": True,
}


@pytest.mark.parametrize("touch", ["set its sum", "get its sum", "set its term"])
@pytest.mark.parametrize("order", ORDERS)
@on_fake_gpus
def test_races_are_found(gpus: GpuSession, order, touch):
    """A graph on one stream, and a copy on another one, though all went well: the graph was done before."""
    with Ggml(gpus.engine) as ggml:
        first, second, event = ggml.stream("FAKE0"), ggml.stream("FAKE0"), ggml.event("FAKE0")
        graph, [term, _, total] = add_graph(ggml, "FAKE0")
        ggml.vectors("FAKE0", 1, N)
        if order == "event before":
            ggml.event_record(event, first)
        assert ggml.graph_compute_async(first, graph) == SUCCESS
        done = filled(0)
        ggml.tensor_get_async(first, total, done.ctypes.data, 0, BYTES)
        while not done.all():  # nobody may rely on that
            pass
        match order:
            case "event":
                ggml.event_record(event, first)
                ggml.event_wait(second, event)
            case "event before":
                ggml.event_wait(second, event)
            case "synchronize":
                ggml.synchronize(first)
            case "synchronize the other":
                ggml.synchronize(second)
            case "free":
                ggml.free_last()
        other = filled(9)
        queue = ggml.tensor_get_async if touch.startswith("get") else ggml.tensor_set_async
        queue(second, term if "term" in touch else total, other.ctypes.data, 0, BYTES)
        ggml.synchronize(second)
        ggml.synchronize(first)
        found = gpus.fakes.take_faults()
        assert ("nothing orders them" in found) == (not ORDERS[order]), found


@pytest.mark.parametrize("synchronized", [False, True])
@on_fake_gpus
def test_races_with_the_host_are_found(gpus: GpuSession, synchronized):
    with Ggml(gpus.engine) as ggml:
        stream = ggml.stream("FAKE0")
        graph, [*_, total] = add_graph(ggml, "FAKE0")
        assert ggml.graph_compute_async(stream, graph) == SUCCESS
        if synchronized:
            ggml.synchronize(stream)
        ggml.tensor_set(total, filled(9).ctypes.data, 0, BYTES)
        ggml.synchronize(stream)
        assert ("nothing orders them" in gpus.fakes.take_faults()) == (not synchronized)
