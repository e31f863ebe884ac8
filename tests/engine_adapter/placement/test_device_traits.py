"""Each kind of device gives one answer to every `auto`: what is asked by a device's name, name by name."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertier.engine_adapter.binding import device_lookup
from expertier.engine_adapter.binding.device_lookup import open_device_lookup
from expertier.engine_adapter.binding.slab_compute import computes_in_slab, follows_demand
from expertier.engine_adapter.hosts.server.server import _gpu_index
from expertier.engine_adapter.placement.blocks import candidates
from expertier.engine_adapter.placement.device_traits import (
    PROXY,
    TABLE,
    UNKNOWN,
    DeviceTraits,
    engine_name,
    ordinal_of,
    traits_of,
)
from expertier.errors import ConfigError
from expertier.hip.driver.vendor import Vendor


@dataclass(frozen=True)
class Answers:
    """What a device's name decides: `lookup` and `slab` where the user says `auto`, the rest as the fields say."""

    driver: tuple[Vendor, int] | None = None
    lookup: bool = False
    capture: bool = False
    slab: bool = False
    slab_if_asked: bool = True
    follows: bool = True
    is_listed: bool = True


CUDA = Answers((Vendor.CUDA, 0), lookup=True, capture=True, slab=True)
ROCM = Answers((Vendor.HIP, 0), follows=False)
RPC = Answers(slab_if_asked=False, follows=False)
CPU = Answers(follows=False, is_listed=False)

ANSWERS = {
    "CUDA0": CUDA,
    "CUDA12": Answers((Vendor.CUDA, 12), lookup=True, capture=True, slab=True),
    "CUDA": Answers(),
    "CUDA0x": Answers(),
    "CUDA\u0663": Answers(),  # a digit, and none that ggml writes
    "cuda0": Answers(),
    "xCUDA0": Answers(),
    "ROCm0": ROCM,
    "ROCm7": Answers((Vendor.HIP, 7), follows=False),
    "ROCm": Answers(follows=False),
    "ROCm0x": Answers(follows=False),
    "HIP0": Answers(),
    "Vulkan0": Answers(follows=False),
    "Vulkan": Answers(follows=False),
    "RPC0": RPC,
    "RPC0[localhost:50052]": RPC,
    "RPC[10.0.0.1:50052]": RPC,
    "CPU": CPU,
    "CPU_REPACK": CPU,
    "BLAS": Answers(is_listed=False),
    "EXPERTS_CUDA0": Answers(is_listed=False),
    "TIER_CUDA0": Answers(),
    "SYCL0": Answers(),
    "Metal": Answers(),
    "FAKE1": Answers(),
    "": Answers(),
}

by_name = pytest.mark.parametrize(("name", "answers"), ANSWERS.items(), ids=[repr(name) for name in ANSWERS])


class FakeProxy:
    """The proxy's calls about devices, of an engine with `names`; those in `hosts` compute in host memory."""

    def __init__(self, names: tuple[str, ...] = (), hosts: tuple[str, ...] = ()) -> None:
        self._names, self._hosts = names, hosts

    def expertier_proxy_can_wrap(self) -> int:
        return 1

    def expertier_proxy_device_name(self, number: int) -> bytes | None:
        return self._names[number].encode() if number < len(self._names) else None

    def expertier_device_is_host(self, name: bytes) -> int:
        return int(name.decode() in self._hosts) if name.decode() in self._names else -1

    def expertier_tiers_open_device_lookup(self, *_: Any) -> int:
        return 1


@by_name
def test_computing_in_the_slab(name: str, answers: Answers) -> None:
    proxy: Any = FakeProxy()
    assert computes_in_slab(proxy, "auto", name) == answers.slab
    assert not computes_in_slab(proxy, False, name)
    if answers.slab_if_asked:
        assert computes_in_slab(proxy, True, name)
    else:
        with pytest.raises(ConfigError, match="MOE_SLAB_COMPUTE=1 was asked for on RPC"):
            computes_in_slab(proxy, True, name)


@by_name
def test_following_demand(name: str, answers: Answers) -> None:
    assert follows_demand("auto", name) == answers.follows
    assert follows_demand(True, name)
    assert not follows_demand(False, name)


@by_name
def test_the_device_look_up(
    name: str, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[tuple[tuple[Vendor, int], bool]] = []

    def record(vendor: Vendor, ordinal: int, *_: Any, captures: bool, **__: Any) -> SimpleNamespace:
        opened.append(((vendor, ordinal), captures))
        return SimpleNamespace(calls=device_lookup.abi.DeviceLookup(), close=lambda: None)

    monkeypatch.setattr(device_lookup, "DeviceLookup", record)
    proxy: Any = FakeProxy()

    def ask(wanted: Any, capture: Any = "auto", environ: Mapping[str, str] = {}) -> Any:
        opened.clear()
        open_device_lookup(proxy, 0, name, wanted, capture=capture, environ=environ)
        return opened[0] if opened else None

    assert ask(False) is None
    assert ask("auto") == ((answers.driver, answers.capture) if answers.lookup else None)
    with caplog.at_level(logging.WARNING):
        assert ask(True) == ((answers.driver, answers.capture) if answers.driver is not None else None)
    assert ("is driven by neither CUDA nor HIP" in caplog.text) == (answers.driver is None)
    if answers.driver is not None:
        assert ask(True, capture=True) == (answers.driver, True)
        assert ask(True, capture=False) == (answers.driver, False)
        assert ask(True, environ={"GGML_CUDA_DISABLE_GRAPHS": "1"}) == (answers.driver, False)


@by_name
def test_the_place_among_the_engines_gpus(name: str, answers: Answers) -> None:
    engine: Any = SimpleNamespace(devices=lambda: [{"name": name}, {"name": "wanted"}])
    assert _gpu_index(engine, "wanted") == int(answers.is_listed)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("CUDA0", "CUDA1", "CUDA10", "CPU"), ["CUDA0", "CUDA1", "CUDA10"]),
        (("CPU", "ROCm0", "CUDA0", "ROCm1"), ["ROCm0", "ROCm1"]),
        (("CUDA0", "CUDA", "CUDA1x"), ["CUDA0", "CUDA"]),
        (("RPC0", "RPC1", "CUDA0"), ["RPC0", "RPC1"]),
        (("RPC0[a:1]", "RPC1[b:1]"), ["RPC0[a:1]"]),
        (("SYCL0", "SYCL1", "Vulkan0"), ["SYCL0", "SYCL1"]),
        (("CPU", "CPU1"), ["CPU"]),
    ],
)
def test_auto_takes_all_gpus_of_the_first_ones_kind(names: tuple[str, ...], chosen: list[str]) -> None:
    proxy: Any = FakeProxy(names, tuple(name for name in names if name.startswith("CPU")))
    assert candidates(proxy, "auto") == chosen


@by_name
def test_the_driver_that_opens_it(name: str, answers: Answers) -> None:
    number = ordinal_of(name)
    driver = traits_of(name).driver
    assert (None if number is None else (driver, number)) == answers.driver
    assert driver is not None or not (traits_of(name).looks_up or traits_of(name).captures)


@pytest.mark.parametrize("row", TABLE, ids=[row.kind for row in TABLE])
def test_each_row_is_found_by_its_kind(row: DeviceTraits) -> None:
    assert traits_of(f"{row.kind}0") is row


def test_rows_do_not_hide_each_other() -> None:
    for number, row in enumerate(TABLE):
        assert not any(row.kind.startswith(before.kind) for before in TABLE[:number])
    assert traits_of("no such kind 0") is UNKNOWN


@pytest.mark.parametrize(("ours", "engines"), [("host", "CPU"), ("cuda:3", "CUDA3"), ("hip:0", "ROCm0")])
def test_the_engines_name_of_our_device(ours: str, engines: str) -> None:
    assert engine_name(ours) == engines


def test_every_driver_of_ours_has_a_row() -> None:
    assert {row.driver for row in TABLE} == {*Vendor, None}


_MATCHING = {"startswith", "removeprefix", "fullmatch", "match", "search", "sub", "compile"}


def test_nothing_else_matches_names_of_devices() -> None:
    """Other code asks the table: a new kind of device is one row."""
    kinds = [row.kind for row in TABLE if row is not PROXY]
    root = Path(__file__).parents[3]
    found = [
        f"{path.relative_to(root)}:{call.lineno}"
        for folder in ("engine_adapter", "hip", "planner", "src", "tiers")
        for path in (root / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in _MATCHING
        and any(
            isinstance(text, ast.Constant)
            and isinstance(text.value, str)
            and text.value.startswith(tuple(kinds))
            for argument in call.args
            for text in ast.walk(argument)
        )
    ]
    assert not found, "ask placement/device_traits.py"
