"""The public names: what is exported, that it stays cheap to import, and that the example runs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import expertier as et
from expertier import errors
from model_files.gguf_files import write_model


def imported_for_type_checkers() -> dict[str, str]:
    """The names that `expertier/__init__.py` imports for type checkers alone, each with the module it comes from."""
    tree = ast.parse(Path(et.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {
        alias.name: node.module
        for node in imports
        if node.module is not None and node.module.startswith("expertier.")
        for alias in node.names
    }


def test_each_exported_name_is_the_object_that_a_type_checker_sees() -> None:
    """The package loads a name when it is first used, from a list of its own; a type checker reads imports."""
    seen = imported_for_type_checkers()
    assert {*et.__all__} == {*seen, "__version__"}
    for name, module in seen.items():
        assert getattr(et, name) is getattr(importlib.import_module(module), name), f"{name} of {module}"


def test_the_version_is_the_packages() -> None:
    assert et.__version__ == version("expertier")


def test_every_error_is_exported_and_has_one_root() -> None:
    """DriverError alone is not exported: a caller catches it as a DeviceError."""
    tree = {name: error for name, error in vars(errors).items() if isinstance(error, type)}
    assert {name for name in et.__all__ if name.endswith("Error")} == {*tree} - {"DriverError"}
    assert all(issubclass(error, et.ExpertierError) for error in tree.values())


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
