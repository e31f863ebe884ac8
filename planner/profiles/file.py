"""Routing profiles as files: our own form, the text form, and every form of recorded routing.

Our own form is a compressed .npz, which docs/traces.md describes.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError
from expertier.planner.profiles.routing_profile import ExpertUses, RoutingProfile, default_phase, profile_of
from expertier.planner.profiles.text_form import looks_like_weights, read_layer_weights
from expertier.planner.traces.atomic_archive import smallest, write_archive
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.trace import MOST_EXPERTS

FORMAT = "expertier-profile-1"
"""What the member `format` holds."""

_SHAPES = {"blocks": 1, "n_experts": 1, "uses": 2, "reuse_distances": 2, "calls": 0}

Arrays = Mapping[str, npt.NDArray[Any]]


def read_profile(path: str | os.PathLike[str]) -> RoutingProfile:
    """Return the profile in a file: one that we wrote, `blk.<layer> <weight>`, or any recording of routing.

    Where a recording has decode steps, only these are counted. Raises ConfigError, which names the file, the line of
    a text, and what is wrong.
    """
    file = Path(path)
    if looks_like_weights(file):
        return RoutingProfile(str(file), layer_weights=read_layer_weights(file))
    arrays = _own_arrays(file)
    if arrays is not None:
        return RoutingProfile(str(file), _experts(file, arrays))
    trace = read_trace(file)
    return profile_of(trace, str(file), default_phase(trace))


def write_profile(path: str | os.PathLike[str], profile: RoutingProfile) -> None:
    """Write our own form, completely or not at all.

    Raises ConfigError where the file cannot be written, or the profile has weights of layers only, whose form is text.
    """
    known = profile.experts
    if known is None:
        raise ConfigError(
            f"{profile.name}: it has weights of layers only, and is a profile as it is: give it as --profile itself"
        )
    arrays: dict[str, Any] = {
        "format": np.array(FORMAT),
        "blocks": smallest(known.blocks),
        "n_experts": smallest(known.n_experts),
        "uses": smallest(known.uses),
        "reuse_distances": smallest(known.reuse_distances),
        "calls": np.array(known.calls, np.int64),
    }
    write_archive(path, arrays, "the profile")


def _own_arrays(file: Path) -> Arrays | None:
    """Return the arrays of a file in our own form; None for a file in another form."""
    try:
        if not zipfile.is_zipfile(file):
            return None
        with np.load(file, allow_pickle=False) as loaded:
            if "format" not in loaded.files or not str(loaded["format"]).startswith("expertier-profile-"):
                return None
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(f"{file}: a broken archive ({error}); make the profile again") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; give a file with a routing profile") from error


def _experts(file: Path, arrays: Arrays) -> ExpertUses:
    found = str(arrays["format"])
    if found != FORMAT:
        raise ConfigError(f"{file}: a profile of format {found!r}; this version reads {FORMAT!r}")
    missing = [name for name in _SHAPES if name not in arrays]
    if missing:
        raise ConfigError(f"{file}: `{'`, `'.join(missing)}` missing; make the profile again")
    for name, n_dimensions in _SHAPES.items():
        array = arrays[name]
        if array.ndim != n_dimensions or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
            raise ConfigError(
                f"{file}: `{name}` is {array.dtype} of shape {list(array.shape)}, not integers of 0 and more in "
                f"{n_dimensions} dimensions"
            )
    n_experts, n_layers = arrays["n_experts"].astype(np.int64), len(arrays["n_experts"])
    if not n_layers or n_experts.min() < 1 or n_experts.max() > MOST_EXPERTS:
        raise ConfigError(f"{file}: `n_experts` must name 1 to {MOST_EXPERTS} experts for each layer")
    most = int(n_experts.max())
    for name, shape in (
        ("blocks", (n_layers,)),
        ("uses", (n_layers, most)),
        ("reuse_distances", (n_layers, most + 1)),
    ):
        if arrays[name].shape != shape:
            raise ConfigError(f"{file}: `{name}` has the shape {arrays[name].shape}, not {shape}")
    blocks = arrays["blocks"].astype(np.int32)
    if (np.diff(blocks) <= 0).any():
        raise ConfigError(f"{file}: `blocks` must rise from layer to layer")
    uses = arrays["uses"].astype(np.int64)
    if (uses[np.arange(most) >= n_experts[:, np.newaxis]] > 0).any():
        raise ConfigError(f"{file}: `uses` counts experts that their layers do not have")
    return ExpertUses(
        blocks=blocks,
        n_experts=n_experts.astype(np.int32),
        uses=uses,
        reuse_distances=arrays["reuse_distances"].astype(np.int64),
        calls=int(arrays["calls"]),
    )
