"""expertier: runs Mixture-of-Experts models larger than VRAM or RAM, with the experts in four memory tiers.

    import expertier as et

    table = et.ExpertTable.from_gguf("model.gguf")
    with et.TierManager(table, device=et.open_device("auto"), config=et.TierConfig.from_env()) as tiers:
        with tiers.acquire(layer, experts) as lease:
            for group in lease.groups:
                launch(group.experts, group.slots, lease.view("gate"), lease.view("up"), lease.view("down"))
        print(tiers.stats())

Every error that is raised on purpose is an `ExpertierError`; the tree is in `expertier.errors`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know this name; importing `typing` for it would take a while
if TYPE_CHECKING:
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
    from expertier.hip.open import open_device
    from expertier.planner.budget.allocate import LayerPlan, plan_layers
    from expertier.planner.budget.demand import LayerDemand
    from expertier.tiers.access.lease import Lease
    from expertier.tiers.config.config import TierConfig
    from expertier.tiers.manager import TierManager
    from expertier.tiers.model.table import ExpertTable
    from expertier.tiers.shared.stats import TierStats

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

_MODULES = {
    "open_device": "hip.open",
    "LayerPlan": "planner.budget.allocate",
    "plan_layers": "planner.budget.allocate",
    "LayerDemand": "planner.budget.demand",
    "TierConfig": "tiers.config.config",
    "Lease": "tiers.access.lease",
    "TierManager": "tiers.manager",
    "TierStats": "tiers.shared.stats",
    "ExpertTable": "tiers.model.table",
}
"""The modules that define the names; every name that is not listed is defined in `errors.py`."""

_PARTS = ("engine_adapter", "errors", "hip", "planner", "tiers", "units")

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a name when it is first used, so that Ctrl-C is answered while a command imports what it needs."""
        import importlib

        if name in _PARTS:
            return importlib.import_module(f"expertier.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'expertier' has no attribute {name!r}")
        module = importlib.import_module(f"expertier.{_MODULES.get(name, 'errors')}")
        globals()[name] = found = getattr(module, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
