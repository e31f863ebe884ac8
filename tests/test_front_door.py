"""The public names: what is exported, that it stays cheap to import, and that the example runs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import expertier as et
from model_files.gguf_files import write_model

NAMES = {
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
}


def test_the_exported_names_are_these() -> None:
    assert set(et.__all__) == NAMES
    assert all(hasattr(et, name) for name in NAMES)


def test_the_version_is_the_packages() -> None:
    assert et.__version__ == version("expertier")


def test_every_error_of_ours_has_one_root() -> None:
    errors = [getattr(et, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, et.ExpertierError) for error in errors)


def test_importing_loads_no_compiler() -> None:
    program = "import sys, expertier; print([name for name in ('numba', 'llvmlite') if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"


def test_an_integrators_use(tmp_path: Path) -> None:
    table = et.ExpertTable.from_gguf(write_model(tmp_path / "model.gguf").path)
    launches = []
    with et.TierManager(
        table, device=et.open_device("auto"), config=et.TierConfig.from_env(environ={})
    ) as tiers:
        tiers.apply(et.plan_layers(table.layer_demands(), budget_bytes=tiers.arena_bytes))
        for layer, experts in [(0, [1, 5]), (1, np.array([[2, 3], [3, 4]])), (0, [5])]:
            with tiers.acquire(layer, experts) as lease:
                for group in lease.groups:
                    views = [lease.view(role) for role in ("gate", "up", "down")]
                    assert len({view.stride_bytes for view in views}) == 1
                    launches.append((layer, group.experts.tolist()))
        assert tiers.stats().l1.hits == 1
    assert launches == [(0, [1, 5]), (1, [2, 3]), (1, [4]), (0, [5])]
