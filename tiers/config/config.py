"""The `MOE_` variables, and the configuration that they are read into once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from expertier.errors import ConfigError
from expertier.planner.budget.sizing import Wishes
from expertier.planner.policy.kind import PolicyKind
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.config.variable import (
    AutoBytes,
    AutoLayers,
    AutoShares,
    AutoSwitch,
    AutoTokens,
    Variable,
    one_of,
    option_name,
    parse_auto_switch,
    parse_device,
    parse_file_mode,
    parse_layers,
    parse_mib,
    parse_path,
    parse_percent,
    parse_policy,
    parse_shares,
    parse_split_mode,
    parse_switch,
    parse_tokens,
)

_MIB_FORM = "`auto` or a number of MiB such as 4096 or 0.5"

VARIABLES: tuple[Variable[Any], ...] = (
    Variable("MOE_EXPERT_CACHE_MIB", "expert_cache_bytes", _MIB_FORM, parse_mib),
    Variable("MOE_HOST_POOL_MIB", "host_pool_bytes", _MIB_FORM, parse_mib),
    Variable(
        "MOE_HOST_POOL_FRAC",
        "host_pool_percent",
        "a percentage above 0 and up to 100, such as 25",
        parse_percent,
    ),
    Variable("MOE_FILL_L2", "fill_pool", "`auto`, `0` or `1`", parse_auto_switch),
    Variable("MOE_POLICY", "policy", " or ".join(f"`{kind}`" for kind in PolicyKind), parse_policy),
    Variable("MOE_PROFILE", "profile", "the name of a file with a routing profile", parse_path),
    Variable("MOE_FILE_MODE", "file_mode", one_of(FileMode, "`"), parse_file_mode),
    Variable(
        "MOE_PREFILL_STREAM_TOKENS",
        "stream_tokens",
        "`auto`, 0 (never) or a number of tokens such as 64",
        parse_tokens,
    ),
    Variable(
        "MOE_DEVICE",
        "engine_device",
        "`auto` or the name of one of the engine's devices, such as CUDA0, ROCm0 or CPU, or several: CUDA0,CUDA1",
        parse_device,
    ),
    Variable(
        "MOE_TENSOR_SPLIT",
        "tensor_split",
        "`auto` or a share of the layers for each device, such as 3,1",
        parse_shares,
    ),
    Variable("MOE_SPLIT_MODE", "split_mode", "`layer` or `tensor`", parse_split_mode),
    Variable("MOE_DECODE_GATE", "decode_gate", "`auto`, `0` or `1`", parse_auto_switch),
    Variable("MOE_DECODE_CAPTURE", "decode_capture", "`auto`, `0` or `1`", parse_auto_switch),
    Variable("MOE_SLAB_COMPUTE", "slab_compute", "`auto`, `0` or `1`", parse_auto_switch),
    Variable(
        "MOE_DECODE_PREFETCH", "decode_prefetch", "`auto` or a number of layers from 0 to 4", parse_layers
    ),
    Variable("MOE_REBALANCE", "follow_demand", "`auto`, `0` or `1`", parse_auto_switch),
    Variable("MOE_SLAB_VMM", "slab_vmm", "`0` or `1`", parse_switch),
    Variable("MOE_SLAB_HEADROOM_MIB", "headroom_bytes", _MIB_FORM, parse_mib),
    Variable("MOE_POOL_RAIL_MIB", "reserve_bytes", _MIB_FORM, parse_mib),
    Variable("MOE_POOL_CAP_MIB", "cap_bytes", _MIB_FORM, parse_mib),
)
"""The variables that have an effect."""

NOT_YET = ("MOE_HOST_POOL_PREFETCH",)
"""Variables of features that do not exist yet; setting one is an error, so that nobody believes it has an effect."""

_PREFIX = "MOE_"
_SHOWN_CHARS = 100  # a message shows so many characters of a text, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """What the user asked for. Sizes are in bytes; `resolve` (`budget.py`) turns an `auto` into bytes.

    docs/environment.md says for each variable what it does. Raises `ConfigError` for values that cannot be used.
    """

    expert_cache_bytes: AutoBytes = "auto"
    """The budget of L1, the slots."""
    host_pool_bytes: AutoBytes = "auto"
    """The budget of L2, the copies in host memory; 0: no L2."""
    host_pool_percent: float = 25.0
    """The share of all expert bytes that `auto` gives: to L1 on the host device, to L2 on other devices."""
    fill_pool: AutoSwitch = "auto"
    """Whether free room in L2 is filled from the file in the background; `auto`: on devices with their own memory."""
    policy: PolicyKind = PolicyKind.LFU_DECAY
    """Which expert is evicted from a layer's slots."""
    profile: Path | None = None
    """A file with a routing profile. Layers get slots by it, and the most used experts are fetched at the start."""
    file_mode: FileMode = FileMode.AUTO
    """How the model's files are read."""
    slab_vmm: bool = False
    """Whether a GPU's slab is made of virtual memory, where the driver passes a probe; such a slab can be resized."""
    stream_tokens: AutoTokens = "auto"
    """The engine's batches of this many tokens or more go through the prefill stream and evict nothing; 0: none do."""
    engine_device: str = "auto"
    """The engine's name for the device that the model runs on, or several names with commas between them."""
    tensor_split: AutoShares = "auto"
    """The share of the layers, or of every expert under tensor split, for each of several devices."""
    split_mode: SplitMode = SplitMode.LAYER
    """Whether several devices share a model by layers or by shards of every layer."""
    decode_gate: AutoSwitch = "auto"
    """Whether decode graphs look up their experts' slots on the device instead of on the host."""
    decode_capture: AutoSwitch = "auto"
    """Whether a decode graph is captured with its look-ups and launched as a whole."""
    slab_compute: AutoSwitch = "auto"
    """Whether the engine's compute buffers lie in the slab, below the slots."""
    follow_demand: AutoSwitch = "auto"
    """Whether layers whose misses cost the engine most time get slots from other layers."""
    decode_prefetch: AutoLayers = "auto"
    """For how many layers ahead decode predicts and fetches experts; 0: for none."""
    headroom_bytes: AutoBytes = "auto"
    """What an `auto` size of L1 leaves of a device's memory to the driver and the BLAS libraries."""
    reserve_bytes: AutoBytes = "auto"
    """What an `auto` size of L1 leaves free of a device's memory besides; `auto`: nothing."""
    cap_bytes: AutoBytes = "auto"
    """L1 never gets more than this; `auto`: no such limit."""
    fill_threads: int = 4
    """Threads that read and copy beside the one that needs experts; 0: prefetches run in `TierManager.drain`."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be used."""
        if self.expert_cache_bytes == 0:
            raise ConfigError(
                "MOE_EXPERT_CACHE_MIB=0 (every call streams, without slots) is not available yet: give "
                "`auto` or the MiB of expert slots"
            )
        for name in ("expert_cache_bytes", "host_pool_bytes", "headroom_bytes", "reserve_bytes", "cap_bytes"):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name} is {value!r}: give `auto` or a number of bytes, not below 0")
        if not 0 < self.host_pool_percent <= 100:
            raise ConfigError(
                f"host_pool_percent is {self.host_pool_percent}: give a percentage above 0 and up to 100"
            )

    def wishes(self) -> Wishes:
        """Return the sizes that the user set, for `planner/budget/sizing.py`, which writes None for `auto`."""

        def number(n_bytes: AutoBytes) -> int | None:
            return None if n_bytes == "auto" else n_bytes

        return Wishes(
            arena_bytes=number(self.expert_cache_bytes),
            cap_bytes=number(self.cap_bytes),
            pool_bytes=number(self.host_pool_bytes),
            share=self.host_pool_percent / 100,
            headroom_bytes=number(self.headroom_bytes),
            reserve_bytes=number(self.reserve_bytes),
        )

    def with_wishes(self, wishes: Wishes) -> Self:
        """Return this config with the sizes of L1 and L2 from `wishes`, such as one device's share of them."""

        def auto(n_bytes: int | None) -> AutoBytes:
            return "auto" if n_bytes is None else n_bytes

        return replace(
            self,
            expert_cache_bytes=auto(wishes.arena_bytes),
            cap_bytes=auto(wishes.cap_bytes),
            host_pool_bytes=auto(wishes.pool_bytes),
        )

    @classmethod
    def from_env(
        cls,
        overrides: Mapping[str, str | None] | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Read the `MOE_` variables; no other code reads them.

        `overrides` maps a variable's name to the text of its command-line option, which takes precedence over the
        variable; None means that the option was not given. Raises `ConfigError` for a text that does not parse, for an
        unknown variable, and for a variable of `NOT_YET`.
        """
        given = {name: (text, name) for name, text in environ.items() if name.startswith(_PREFIX)}
        for name, override in (overrides or {}).items():
            if override is not None:
                given[name] = (override, option_name(name))
        known = {variable.name: variable for variable in VARIABLES}
        values: dict[str, Any] = {}
        for name, (text, said_as) in given.items():
            if name in NOT_YET:
                raise ConfigError(f"{said_as}={_shown(text)} is not available yet: leave it out")
            if name not in known:
                raise _unknown(name, said_as)
            variable = known[name]
            try:
                values[variable.field] = variable.parse(text.strip())
            except ValueError as error:
                raise ConfigError(
                    f"{said_as}={_shown(text)} cannot be read: give {variable.accepts}"
                ) from error
        return cls(**values)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]!r}..."


def _unknown(name: str, said_as: str) -> ConfigError:
    names = [variable.name for variable in VARIABLES] + list(NOT_YET)
    nearest = difflib.get_close_matches(name[:_SHOWN_CHARS], names, n=1, cutoff=0.0)
    if len(said_as) > _SHOWN_CHARS:
        said_as = f"{said_as[:_SHOWN_CHARS]}..."
    return ConfigError(f"{said_as} is not a variable of expertier: did you mean {nearest[0]}?")
