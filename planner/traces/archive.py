"""Recorded routing in NumPy's own forms: `ids` by other programs, and the compact form of `--record-routing`.

docs/traces.md describes both.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError
from expertier.planner.traces.atomic_archive import smallest, write_archive
from expertier.planner.traces.trace import MOST_EXPERTS, Trace, first_repeated, trace_from_ids

FORMAT = "expertier-routing-1"
"""What the member `format` of the compact form holds."""

_ONE_A_CALL = ("layer", "step_change", "phase", "rows", "length")
_ONE_A_LAYER = ("n_experts", "blocks")

Arrays = Mapping[str, npt.NDArray[Any]]


def read_archive(file: Path, opened: IO[bytes]) -> Trace:
    """Return the trace of a .npz or .npy; `file` names it in errors. Raises ConfigError."""
    arrays = load_arrays(file, opened)
    if "format" in arrays:
        return _from_compact(file, arrays)
    if "ids" in arrays:
        return _from_ids(file, arrays)
    raise ConfigError(
        f"{file}: it holds {', '.join(arrays) or 'nothing'}; recorded routing has `ids` or `format`"
    )


def load_arrays(file: Path, opened: IO[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .npz by name, or the array of a .npy as `ids`. Raises ConfigError for other files."""
    try:
        loaded = np.load(opened, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"ids": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(
            f"{file}: not recorded routing in NumPy's form ({error}); give a .npz with `ids` [steps, layers, "
            "top-k], a .npy of them, or what --record-routing wrote"
        ) from error


def checked_ids(
    file: Path, arrays: Arrays
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]] | None]:
    """Return `ids` [steps, layers, top-k] and, where the file has them, `offsets`; the ids' values are not checked.

    Raises ConfigError where the arrays have another form.
    """
    ids = arrays["ids"]
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise ConfigError(
            f"{file}: `ids` is {ids.dtype} of shape {list(ids.shape)}; recorded routing is integers of shape "
            "[steps, layers, top-k], none of them 0"
        )
    offsets = arrays.get("offsets")
    if offsets is not None:
        _check_bounds(file, "offsets", offsets, len(ids), "steps")
    return ids, offsets


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write the compact form, without `resident`, completely or not at all.

    Raises ConfigError where the file cannot be written.
    """
    arrays: dict[str, Any] = {
        "format": np.array(FORMAT),
        "layer": smallest(trace.layer),
        "step_change": smallest(np.diff(trace.step, prepend=0)),
        "phase": trace.phase,
        "rows": smallest(trace.rows),
        "length": smallest(trace.lengths),
        "experts": smallest(trace.experts),
        "sequences": trace.sequences,
        "n_experts": trace.n_experts,
        "blocks": trace.blocks,
    }
    if trace.expert_bytes is not None:
        arrays["expert_bytes"] = trace.expert_bytes
    write_archive(path, arrays, "recorded routing")


def _from_ids(file: Path, arrays: Arrays) -> Trace:
    ids, offsets = checked_ids(file, arrays)
    _check_range(file, ids, MOST_EXPERTS)
    trace = trace_from_ids(ids, offsets)
    twice = first_repeated(trace.bounds, trace.experts)
    if twice is not None:
        raise ConfigError(
            f"{file}: step {trace.step[twice]} names an expert twice in layer {trace.layer[twice]}: "
            f"{ids[trace.step[twice], trace.layer[twice]].tolist()}; the experts of a step are different ones"
        )
    return trace


def _from_compact(file: Path, arrays: Arrays) -> Trace:
    found = str(arrays["format"])
    if found != FORMAT:
        raise ConfigError(f"{file}: recorded routing of format {found!r}; this version reads {FORMAT!r}")
    missing = [n for n in (*_ONE_A_CALL, *_ONE_A_LAYER, "experts", "sequences") if n not in arrays]
    if missing:
        raise ConfigError(f"{file}: `{'`, `'.join(missing)}` missing; record it again")
    sizes = arrays.get("expert_bytes")
    for name, array in arrays.items():
        if name != "format" and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise ConfigError(f"{file}: `{name}` is {array.dtype} of shape {list(array.shape)}, not integers")
    for group, like in ((_ONE_A_CALL, "layer"), (_ONE_A_LAYER, "n_experts")):
        for name in group:
            if len(arrays[name]) != len(arrays[like]):
                raise ConfigError(
                    f"{file}: `{name}` has {len(arrays[name])} entries, `{like}` has {len(arrays[like])}; they "
                    "describe the same things"
                )
    if sizes is not None and len(sizes) != len(arrays["n_experts"]):
        raise ConfigError(
            f"{file}: `expert_bytes` has {len(sizes)} entries for {len(arrays['n_experts'])} layers"
        )
    lengths = arrays["length"].astype(np.int64)
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    _check_bounds(file, "length", bounds, len(arrays["experts"]), "experts")
    _check_bounds(file, "sequences", arrays["sequences"], len(lengths), "calls")
    _check_numbers(file, arrays)
    trace = Trace(
        layer=arrays["layer"].astype(np.int32),
        step=np.cumsum(arrays["step_change"].astype(np.int64)),
        phase=arrays["phase"].astype(np.uint8),
        rows=arrays["rows"].astype(np.int32),
        bounds=bounds,
        experts=arrays["experts"].astype(np.int32),
        sequences=arrays["sequences"].astype(np.int64),
        n_experts=arrays["n_experts"].astype(np.int32),
        blocks=arrays["blocks"].astype(np.int32),
        expert_bytes=None if sizes is None else sizes.astype(np.int64),
    )
    twice = first_repeated(trace.bounds, trace.experts)
    if twice is not None:
        raise ConfigError(f"{file}: call {twice} names an expert twice; a call's experts are different ones")
    return trace


def _check_numbers(file: Path, arrays: Arrays) -> None:
    """Refuse numbers out of their range."""
    n_experts = arrays["n_experts"].astype(np.int64)
    layer = arrays["layer"].astype(np.int64)
    blocks = arrays["blocks"].astype(np.int64)
    sizes = arrays.get("expert_bytes", np.ones(1, np.int64))
    limit = np.repeat(
        n_experts[np.clip(layer, 0, len(n_experts) - 1)] if len(n_experts) else layer, arrays["length"]
    )
    for wrong, what in (
        (not len(n_experts), "no layer has experts"),
        ((layer < 0).any() or (layer >= len(n_experts)).any(), f"`layer` leaves 0 to {len(n_experts) - 1}"),
        (
            (n_experts < 1).any() or (n_experts > MOST_EXPERTS).any(),
            f"`n_experts` leaves 1 to {MOST_EXPERTS}",
        ),
        ((arrays["length"] < 1).any(), "a `length` is below 1"),
        ((arrays["rows"] < 1).any() or (arrays["rows"] >= 1 << 31).any(), "`rows` leaves 1 to 2147483647"),
        ((arrays["phase"] > 1).any() or (arrays["phase"] < 0).any(), "a `phase` is neither 0 nor 1"),
        ((np.diff(blocks) <= 0).any() or (blocks < 0).any(), "`blocks` does not rise from 0 or more"),
        ((sizes < 1).any() or (sizes >= 1 << 48).any(), "`expert_bytes` leaves 1 to 2^48"),
        ((arrays["experts"] < 0).any() or (arrays["experts"] >= limit).any(), "an expert leaves its layer's"),
    ):
        if wrong:
            raise ConfigError(f"{file}: {what}; record it again")


def _check_range(file: Path, ids: npt.NDArray[Any], limit: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        raise ConfigError(
            f"{file}: experts {low} to {high} are named; ids count from 0 and stay below {limit}"
        )


def _check_bounds(file: Path, name: str, bounds: npt.NDArray[Any], end: int, of: str) -> None:
    if bounds.ndim != 1 or len(bounds) < 1 or bounds.dtype.kind not in "iu":
        raise ConfigError(f"{file}: `{name}` is {bounds.dtype} of shape {list(bounds.shape)}")
    wide = bounds.astype(np.int64)
    if wide[0] != 0 or wide[-1] != end or (np.diff(wide) < 0).any():
        raise ConfigError(
            f"{file}: `{name}` must rise from 0 to its {end} {of}; it goes from {wide[0]} to {wide[-1]}"
        )
