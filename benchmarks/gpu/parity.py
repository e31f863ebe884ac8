"""Compares the tiers' logits with stock's, everything on the same device, over types, slots and widths."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.models.model_shape import N_SPECIAL_TOKENS, ModelShape
from expertier.engine_adapter.models.synth import write_model
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from gpu.child import run_child
from gpu.opening import Placement
from gpu.parity_run import SidesOptions
from gpu.settings import engine_settings
from gpu.tensors import first_difference

F32 = npt.NDArray[np.float32]

_BASE = ModelShape(
    layers=4, experts=16, top_k=4, n_embd=512, n_ff=256, heads=8, kv_heads=4, head_dim=64, vocab=1024, seed=11,
    gate_up_type="Q4_0", down_type="Q4_0", dense_type="Q8_0",
)  # fmt: skip

PARITY_MODELS = {
    "Q4_0": _BASE,
    "Q4_K+Q6_K": replace(_BASE, n_ff=512, gate_up_type="Q4_K", down_type="Q6_K"),  # a block for each device
    "Q8_0": replace(_BASE, gate_up_type="Q8_0", down_type="Q8_0"),
    "MXFP4 gpt-oss": replace(_BASE, gate_up_type="MXFP4", down_type="MXFP4", architecture="gpt-oss"),
}


def slot_counts(shape: ModelShape) -> list[int]:
    """Return the numbers of slots a layer that are compared: from top-k to all."""
    return sorted({shape.top_k, shape.top_k + 1, shape.experts // 2, shape.experts})


def compare(stock: F32, ours: F32) -> dict[str, Any]:
    """Compare two runs' logits, float32 [tokens, n_vocab]."""
    difference = np.abs(stock - ours)
    differing = np.flatnonzero((stock.view(np.uint32) != ours.view(np.uint32)).any(axis=1))
    return {
        "identical": len(differing) == 0,
        "rows": len(stock),
        "differing_rows": len(differing),
        "first_row": int(differing[0]) if len(differing) else None,
        "max_difference": float(difference.max()) if np.isfinite(difference).all() else float("inf"),
        "mean_magnitude": float(np.abs(stock).mean()),
        "argmax_agrees": float((stock.argmax(axis=1) == ours.argmax(axis=1)).mean()),
    }


def run_parity(
    name: str, options: argparse.Namespace, n_ubatch: int, slots: list[int] | None, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Compare one model; returns the findings for each number of slots, and `stock` where that failed."""
    shape = PARITY_MODELS[name]
    path: Path = options.folder / f"parity-{name.replace(' ', '-').replace('+', '-')}.gguf"
    if not path.exists():
        write_model(path, shape)
    table = ExpertTable.from_gguf(path)
    sides = {"stock": Placement("vram", options.device)}
    for n_slots in slots or slot_counts(shape):
        n_bytes = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
        all_in_l2 = table.expert_bytes_total + 4 * MIB
        sides[f"{n_slots} of {shape.experts}"] = Placement("ours", options.device, n_bytes, all_in_l2)
    with tempfile.TemporaryDirectory(prefix="expertier-parity-") as folder:
        asked = SidesOptions(
            path=str(path),
            sides=sides,
            first_token=N_SPECIAL_TOKENS,
            n_ubatch=n_ubatch,
            folder=folder,
            keeps_tensors=False,
            **engine_settings(options),
        )
        found = _run_sides(asked, options.row_timeout)
        if "failed" in found["stock"]:
            say(f"parity of {name}: stock failed: {found['stock']['failed']}")
            return {"stock": found["stock"]}
        stock = _load(Path(folder), "stock")
        del found["stock"]
        for label, findings in found.items():
            if "failed" not in findings:
                ours = _load(Path(folder), label)
                findings["segments"] = {key: compare(stock[key], ours[key]) for key in stock}
            say(f"parity of {name}, ubatch {n_ubatch}, {label} slots: {verdict(findings)}")
            if options.first_difference and _differing(findings):
                findings["first_difference"] = _first_difference(asked, label, options.row_timeout)
                say(f"the first tensor that differs: {findings['first_difference']}")
    return found


def verdict(findings: dict[str, Any]) -> str:
    """Say in a line what came out."""
    if "failed" in findings:
        return f"failed: {findings['failed']}"
    differ = _differing(findings)
    said = f"differs in {', '.join(differ)}" if differ else "bit-identical"
    if compute := findings.get("compute"):
        said += f"; the boundary moved up {compute['moves_up']} times, down {compute['moves_down']}"
    return said


def _differing(findings: dict[str, Any]) -> list[str]:
    return [key for key, found in findings.get("segments", {}).items() if not found["identical"]]


def _first_difference(asked: SidesOptions, label: str, timeout_s: float) -> dict[str, Any]:
    """Run stock and one more side again, node by node, and compare all that they compute."""
    sides = {"stock": asked.sides["stock"], label: asked.sides[label]}
    found = _run_sides(replace(asked, sides=sides, keeps_tensors=True), timeout_s)
    broken = [findings for findings in found.values() if "failed" in findings]
    if broken:
        return broken[0]
    files = [Path(asked.folder) / f"{side}.tensors" for side in sides]
    difference = first_difference(*files)
    for file in files:
        file.unlink()
    return difference


def _run_sides(asked: SidesOptions, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Compute all sides in as few processes as there are failures, and one more; a failure costs its side alone."""
    script = Path(__file__).with_name("parity_run.py")
    left = dict(asked.sides)
    found: dict[str, dict[str, Any]] = {}
    while left:
        findings = run_child(script, asdict(replace(asked, sides=left)), timeout_s=timeout_s)
        done = findings.get("done", {})
        found |= done
        left = {label: side for label, side in left.items() if label not in done}
        if left and "failed" in findings:
            broken = next(iter(left))
            found[broken] = {"failed": findings["failed"]}
            del left[broken]
            if broken == "stock":
                break
    return found


def _load(folder: Path, label: str) -> dict[str, F32]:
    with np.load(folder / f"{label}.npz") as loaded:
        return {key: loaded[key] for key in loaded.files}
