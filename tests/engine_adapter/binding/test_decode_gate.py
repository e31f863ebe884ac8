"""Who gets a gate of decode graphs, and what is given back where it does not work."""

from __future__ import annotations

import logging

import pytest

from expertier.engine_adapter.abi import structs as proxy_abi
from expertier.engine_adapter.binding import decode_gate
from expertier.errors import DeviceError

TIERS = 17


class Proxy:
    """The proxy's one call for a gate."""

    def __init__(self, works: bool = True, says: str = "") -> None:
        self.works, self.says = works, says

    def expertier_tiers_open_gate(self, tiers, calls, error, size):
        assert tiers == TIERS
        assert calls
        error.value = self.says.encode()[: size - 1]
        return int(self.works)


@pytest.fixture
def gates(monkeypatch):
    """Stands for what a driver gives: the gates that were made, each with what it was asked for."""
    made = []

    class Gate:
        def __init__(self, vendor, ordinal, environ, prefetch, *, expert_bytes, captures):
            self.environ = environ
            self.asked = (str(vendor), ordinal, prefetch, expert_bytes, captures)
            self.calls = proxy_abi.Gate()
            self.n_closed = 0
            made.append(self)

        def close(self):
            self.n_closed += 1

    monkeypatch.setattr(decode_gate, "DecodeGate", Gate)
    return made


def open_gate(proxy: Proxy, device: str, wanted=True, **options):
    return decode_gate.open_gate(proxy, TIERS, device, wanted, expert_bytes=5, environ={}, **options)


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_one_on_cuda(gates, wanted):
    gate = open_gate(Proxy(), "CUDA1", wanted)
    assert gates == [gate]
    assert gate.asked == ("cuda", 1, "auto", 5, True)
    assert gate.n_closed == 0


@pytest.mark.parametrize(("device", "wanted"), [("CUDA0", False), ("ROCm0", "auto"), ("CPU", "auto")])
def test_none_where_none_is_wanted(gates, device, wanted):
    assert open_gate(Proxy(), device, wanted) is None
    assert gates == []


def test_one_on_rocm_where_it_is_asked_for(gates):
    assert open_gate(Proxy(), "ROCm0") is gates[0]
    assert gates[0].asked == ("hip", 0, "auto", 5, False)


@pytest.mark.parametrize(("capture", "captures"), [("auto", False), (True, True), (False, False)])
def test_captures_where_llama_cpp_makes_no_graphs(gates, capture, captures):
    environ = {"GGML_CUDA_DISABLE_GRAPHS": "1"}
    decode_gate.open_gate(Proxy(), TIERS, "CUDA0", True, capture=capture, environ=environ)
    assert gates[0].asked[-1] == captures


def test_one_that_the_proxy_refuses_is_given_back(gates, caplog):
    assert open_gate(Proxy(works=False, says="no memory for it"), "CUDA0") is None
    assert [gate.n_closed for gate in gates] == [1]
    assert "event=gate enabled=0 device=CUDA0 reason=no memory for it" in caplog.text


def test_parts_that_do_not_work_are_named(gates, caplog):
    with caplog.at_level(logging.WARNING):
        assert (
            open_gate(Proxy(says="capture\tthe driver refused\nprefetch\tno memory\n"), "CUDA0") is gates[0]
        )
    assert "event=capture enabled=0 device=CUDA0 reason=the driver refused" in caplog.text
    assert "event=prefetch enabled=0 device=CUDA0 reason=no memory" in caplog.text
    assert gates[0].n_closed == 0


def test_a_driver_without_it(monkeypatch, caplog):
    def refuse(*_arguments, **_options):
        raise DeviceError("no driver here")

    monkeypatch.setattr(decode_gate, "DecodeGate", refuse)
    assert open_gate(Proxy(), "CUDA0") is None
    assert open_gate(Proxy(), "Vulkan0") is None
    assert "no driver here" in caplog.text
    assert "Vulkan0 is driven by neither CUDA nor HIP" in caplog.text
