"""expertier: runs Mixture-of-Experts models larger than VRAM or RAM, with the experts in four memory tiers.

    import expertier as et

    table = et.ExpertTable.from_gguf("model.gguf")
    with et.TierManager(table, device=et.open_device("auto"), config=et.TierConfig.from_env()) as tiers:
        with tiers.acquire(layer, experts) as lease:
            for part in lease.parts:
                launch(part.experts, part.slots, lease.view("gate"), lease.view("up"), lease.view("down"))
        print(tiers.stats())

Every error that is raised on purpose is an `ExpertierError`; the tree is in `expertier.errors`.
"""

from __future__ import annotations

from expertier.errors import (
    BudgetError,
    BuildError,
    BusyError,
    ConfigError,
    DecodeError,
    DeviceError,
    EngineError,
    EngineMismatchError,
    EngineMissingError,
    ExpertierError,
    LeaseError,
    ModelError,
    NotGgufError,
    NotMoeError,
    SourceError,
    TruncatedModelError,
    UnsupportedLayoutError,
)
from expertier.hip.device import open_device
from expertier.planner.allocate import LayerPlan, plan_layers
from expertier.planner.demand import LayerDemand
from expertier.tiers.config import TierConfig
from expertier.tiers.lease import Lease
from expertier.tiers.manager import TierManager
from expertier.tiers.stats import TierStats
from expertier.tiers.table import ExpertTable

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "BuildError",
    "BusyError",
    "ConfigError",
    "DecodeError",
    "DeviceError",
    "EngineError",
    "EngineMismatchError",
    "EngineMissingError",
    "ExpertTable",
    "ExpertierError",
    "LayerDemand",
    "LayerPlan",
    "Lease",
    "LeaseError",
    "ModelError",
    "NotGgufError",
    "NotMoeError",
    "SourceError",
    "TierConfig",
    "TierManager",
    "TierStats",
    "TruncatedModelError",
    "UnsupportedLayoutError",
    "__version__",
    "open_device",
    "plan_layers",
]
