"""Who gets a device look-up of decode graphs, and what is given back where it does not work."""

from __future__ import annotations

import logging

import pytest

from expertier.engine_adapter.abi import structs as proxy_abi
from expertier.engine_adapter.binding import device_lookup
from expertier.errors import DeviceError

TIERS = 17


class Proxy:
    """The proxy's one call for a device look-up."""

    def __init__(self, works: bool = True, says: str = "") -> None:
        self.works, self.says = works, says

    def expertier_tiers_open_device_lookup(self, tiers, calls, error, size):
        assert tiers == TIERS
        assert calls
        error.value = self.says.encode()[: size - 1]
        return int(self.works)


@pytest.fixture
def lookups(monkeypatch):
    """Stands for what a driver gives: the device look-ups that were made, each with what it was asked for."""
    made = []

    class DeviceLookup:
        def __init__(self, vendor, ordinal, environ, prefetch, *, expert_bytes, captures):
            self.environ = environ
            self.asked = (str(vendor), ordinal, prefetch, expert_bytes, captures)
            self.calls = proxy_abi.DeviceLookup()
            self.n_closed = 0
            made.append(self)

        def close(self):
            self.n_closed += 1

    monkeypatch.setattr(device_lookup, "DeviceLookup", DeviceLookup)
    return made


def open_device_lookup(proxy: Proxy, device: str, wanted=True, **options):
    return device_lookup.open_device_lookup(
        proxy, TIERS, device, wanted, expert_bytes=5, environ={}, **options
    )


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_one_on_cuda(lookups, wanted):
    lookup = open_device_lookup(Proxy(), "CUDA1", wanted)
    assert lookups == [lookup]
    assert lookup.asked == ("cuda", 1, "auto", 5, True)
    assert lookup.n_closed == 0


@pytest.mark.parametrize(("device", "wanted"), [("CUDA0", False), ("ROCm0", "auto"), ("CPU", "auto")])
def test_none_where_none_is_wanted(lookups, device, wanted):
    assert open_device_lookup(Proxy(), device, wanted) is None
    assert lookups == []


def test_one_on_rocm_where_it_is_asked_for(lookups):
    assert open_device_lookup(Proxy(), "ROCm0") is lookups[0]
    assert lookups[0].asked == ("hip", 0, "auto", 5, False)


@pytest.mark.parametrize(("capture", "captures"), [("auto", False), (True, True), (False, False)])
def test_captures_where_llama_cpp_makes_no_graphs(lookups, capture, captures):
    environ = {"GGML_CUDA_DISABLE_GRAPHS": "1"}
    device_lookup.open_device_lookup(Proxy(), TIERS, "CUDA0", True, capture=capture, environ=environ)
    assert lookups[0].asked[-1] == captures


def test_one_that_the_proxy_refuses_is_given_back(lookups, caplog):
    assert open_device_lookup(Proxy(works=False, says="no memory for it"), "CUDA0") is None
    assert [lookup.n_closed for lookup in lookups] == [1]
    assert "event=device_lookup enabled=0 device=CUDA0 reason=no memory for it" in caplog.text


def test_parts_that_do_not_work_are_named(lookups, caplog):
    with caplog.at_level(logging.WARNING):
        assert (
            open_device_lookup(Proxy(says="capture\tthe driver refused\nprefetch\tno memory\n"), "CUDA0")
            is lookups[0]
        )
    assert "event=capture enabled=0 device=CUDA0 reason=the driver refused" in caplog.text
    assert "event=prefetch enabled=0 device=CUDA0 reason=no memory" in caplog.text
    assert lookups[0].n_closed == 0


def test_a_driver_without_it(monkeypatch, caplog):
    def refuse(*_arguments, **_options):
        raise DeviceError("no driver here")

    monkeypatch.setattr(device_lookup, "DeviceLookup", refuse)
    assert open_device_lookup(Proxy(), "CUDA0") is None
    assert open_device_lookup(Proxy(), "Vulkan0") is None
    assert "no driver here" in caplog.text
    assert "Vulkan0 is driven by neither CUDA nor HIP" in caplog.text
