"""The options that size the tiers, as `run` and `serve` take them."""

from __future__ import annotations

from typing import Annotated

import typer

from expertier.planner.policy.kind import PolicyKind
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.file_mode import FileMode as Modes
from expertier.tiers.config.variable import one_of

ExpertCacheMib = Annotated[
    str | None, typer.Option(metavar="MIB|auto", help="L1 arena (MOE_EXPERT_CACHE_MIB).")
]
HostPoolMib = Annotated[str | None, typer.Option(metavar="MIB|auto", help="L2 pool (MOE_HOST_POOL_MIB).")]
HostPoolFrac = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT", help="Share of the expert bytes that auto takes for L2 (MOE_HOST_POOL_FRAC)."
    ),
]
Policy = Annotated[str | None, typer.Option(help=f"{one_of(PolicyKind)} (MOE_POLICY).")]
FileMode = Annotated[str | None, typer.Option(help=f"{one_of(Modes)} (MOE_FILE_MODE).")]
SlabVmm = Annotated[
    str | None, typer.Option(metavar="0|1", help="1: the slab on a GPU can be resized (MOE_SLAB_VMM).")
]

Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The engine's device, such as CUDA0 or CPU, or several: CUDA0,CUDA1; auto: one GPU, or all where the "
        "experts do not fit one (MOE_DEVICE).",
    ),
]

TensorSplit = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Shares of several devices, such as 3,1 (MOE_TENSOR_SPLIT)."),
]

SplitMode = Annotated[
    str | None,
    typer.Option(
        metavar="layer|tensor",
        help="What several devices share: layers, or every tensor (MOE_SPLIT_MODE).",
    ),
]

Profile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="A routing profile: slots a layer, and experts to begin with (MOE_PROFILE)."
    ),
]


def tier_config(
    expert_cache_mib: str | None,
    host_pool_mib: str | None,
    host_pool_frac: str | None,
    policy: str | None,
    file_mode: str | None,
    slab_vmm: str | None,
    profile: str | None,
    device: str | None = None,
    tensor_split: str | None = None,
    split_mode: str | None = None,
) -> TierConfig:
    """Return the variables with the options over them."""
    return TierConfig.from_env(
        overrides={
            "MOE_EXPERT_CACHE_MIB": expert_cache_mib,
            "MOE_HOST_POOL_MIB": host_pool_mib,
            "MOE_HOST_POOL_FRAC": host_pool_frac,
            "MOE_POLICY": policy,
            "MOE_FILE_MODE": file_mode,
            "MOE_SLAB_VMM": slab_vmm,
            "MOE_PROFILE": profile,
            "MOE_DEVICE": device,
            "MOE_TENSOR_SPLIT": tensor_split,
            "MOE_SPLIT_MODE": split_mode,
        }
    )
