"""The variables: what parses, what is refused, and what the refusal says."""

from __future__ import annotations

import os
from typing import Any

import pytest

from expertier.errors import ConfigError
from expertier.planner import PolicyKind
from expertier.tiers.config.config import NOT_YET, VARIABLES, TierConfig
from expertier.tiers.config.file_mode import FileMode
from expertier.units import MIB


def test_nothing_set_is_the_default() -> None:
    assert TierConfig.from_env(environ={"HOME": "/", "MOEBIUS": "1"}) == TierConfig()
    assert TierConfig() == TierConfig(
        expert_cache_bytes="auto",
        host_pool_bytes="auto",
        host_pool_percent=25.0,
        policy=PolicyKind.LFU_DECAY,
        file_mode=FileMode.AUTO,
    )


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("MOE_EXPERT_CACHE_MIB", "auto", "expert_cache_bytes", "auto"),
        ("MOE_EXPERT_CACHE_MIB", "4096", "expert_cache_bytes", 4096 * MIB),
        ("MOE_EXPERT_CACHE_MIB", " 0.5 ", "expert_cache_bytes", MIB // 2),
        ("MOE_EXPERT_CACHE_MIB", "0.1", "expert_cache_bytes", 104857),
        ("MOE_HOST_POOL_MIB", "0", "host_pool_bytes", 0),
        ("MOE_HOST_POOL_MIB", "7.", "host_pool_bytes", 7 * MIB),
        ("MOE_HOST_POOL_FRAC", "12.5", "host_pool_percent", 12.5),
        ("MOE_HOST_POOL_FRAC", "100", "host_pool_percent", 100.0),
        ("MOE_POLICY", "lru", "policy", PolicyKind.LRU),
        ("MOE_POLICY", "lfu-decay", "policy", PolicyKind.LFU_DECAY),
        ("MOE_FILE_MODE", "auto", "file_mode", FileMode.AUTO),
        ("MOE_FILE_MODE", "page-cache", "file_mode", FileMode.PAGE_CACHE),
        ("MOE_FILE_MODE", " direct", "file_mode", FileMode.DIRECT),
        ("MOE_SLAB_VMM", "1", "slab_vmm", True),
        ("MOE_SLAB_HEADROOM_MIB", "256", "headroom_bytes", 256 * MIB),
        ("MOE_SLAB_HEADROOM_MIB", "auto", "headroom_bytes", "auto"),
        ("MOE_POOL_RAIL_MIB", "0", "reserve_bytes", 0),
        ("MOE_POOL_CAP_MIB", "8192", "cap_bytes", 8192 * MIB),
        ("MOE_SLAB_VMM", " 0", "slab_vmm", False),
        ("MOE_DEVICE", "CUDA0", "engine_device", "CUDA0"),
        ("MOE_DEVICE", " CUDA0, CUDA1 ", "engine_device", "CUDA0,CUDA1"),
        ("MOE_TENSOR_SPLIT", "auto", "tensor_split", "auto"),
        ("MOE_TENSOR_SPLIT", "3,1", "tensor_split", (3.0, 1.0)),
        ("MOE_TENSOR_SPLIT", "0.5/ 1.5/0", "tensor_split", (0.5, 1.5, 0.0)),
    ],
)
def test_values(name: str, text: str, field: str, value: object) -> None:
    assert getattr(TierConfig.from_env(environ={name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[
            ("MOE_EXPERT_CACHE_MIB", text)
            for text in ("", "-1", "1e3", "4 GiB", "nan", "inf", "AUTO", "٣", "0x10", "9" * 40)
        ],
        *[("MOE_HOST_POOL_FRAC", text) for text in ("", "0", "100.1", "25%", "auto", "-5")],
        *[("MOE_POLICY", text) for text in ("", "lfu", "LRU", "belady")],
        *[("MOE_FILE_MODE", text) for text in ("", "mmap", "DIRECT", "page cache")],
        *[("MOE_SLAB_VMM", text) for text in ("", "2", "yes", "true", "01")],
        *[("MOE_DEVICE", text) for text in ("", ",", "CUDA0,", "CUDA0,CUDA0", "auto,CUDA0", "CUDA 0", "0")],
        *[("MOE_TENSOR_SPLIT", text) for text in ("", "0,0", "1,", "-1,2", "1;2", "1e3", "9999999,1")],
    ],
)
def test_a_text_that_does_not_parse_names_variable_value_and_form(name: str, text: str) -> None:
    accepts = next(variable.accepts for variable in VARIABLES if variable.name == name)
    with pytest.raises(ConfigError) as caught:
        TierConfig.from_env(environ={name: text})
    assert str(caught.value) == f"{name}={text!r} cannot be read: give {accepts}"


@pytest.mark.parametrize("name", NOT_YET)
def test_variables_without_machinery_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='1' is not available yet"):
        TierConfig.from_env(environ={name: "1"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("MOE_EXPERT_CACHE_MB", "MOE_EXPERT_CACHE_MIB"),
        ("MOE_POLCY", "MOE_POLICY"),
        ("MOE_HOST_POOL", "MOE_HOST_POOL_MIB"),
        ("MOE_SLAB_VM", "MOE_SLAB_VMM"),
        ("MOE_", "MOE_"),
    ],
)
def test_unknown_variables_name_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a variable of expertier: did you mean {nearest}"):
        TierConfig.from_env(environ={name: "1"})


def test_no_cache_at_all_is_not_available_yet() -> None:
    with pytest.raises(ConfigError, match=r"MOE_EXPERT_CACHE_MIB=0 .* not available yet"):
        TierConfig.from_env(environ={"MOE_EXPERT_CACHE_MIB": "0"})


def test_overrides_go_first_and_errors_name_the_option() -> None:
    environ = {"MOE_EXPERT_CACHE_MIB": "junk", "MOE_POLICY": "lru"}
    config = TierConfig.from_env({"MOE_EXPERT_CACHE_MIB": "8", "MOE_POLICY": None}, environ=environ)
    assert (config.expert_cache_bytes, config.policy) == (8 * MIB, PolicyKind.LRU)
    with pytest.raises(ConfigError, match=r"^--host-pool-mib='much' cannot be read"):
        TierConfig.from_env({"MOE_HOST_POOL_MIB": "much"}, environ={})


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOE_POLICY", "lru")
    assert TierConfig.from_env().policy is PolicyKind.LRU


@pytest.mark.parametrize(
    "values",
    [
        {"expert_cache_bytes": -1},
        {"expert_cache_bytes": "much"},
        {"expert_cache_bytes": 0},
        {"host_pool_bytes": -1},
        {"host_pool_bytes": 1.5},
        {"host_pool_percent": 0},
        {"host_pool_percent": float("nan")},
    ],
)
def test_values_given_in_python_are_checked_too(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TierConfig(**values)
