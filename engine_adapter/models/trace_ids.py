"""Reads recorded routing: which experts each layer chose, step by step.

Two forms, both NumPy's own:

    FILE.npz   `ids`, integers of shape [steps, layers, top-k], the heaviest expert first where that is known; and
               `offsets`, integers [sequences + 1], optional: sequence i is steps offsets[i] .. offsets[i + 1]
    FILE.npy   `ids` alone: one sequence
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError
from expertier.planner.traces.archive import checked_ids, load_arrays
from expertier.planner.traces.trace import MOST_EXPERTS

I32 = npt.NDArray[np.int32]


def read_trace_ids(
    path: str | os.PathLike[str], *, sequence: int | None = None, steps: int | None = None
) -> I32:
    """Return the experts of recorded steps: int32 [steps, layers, top-k], in the file's order.

    `sequence` picks one of the file's sequences; without it, all sequences are read, one after another. `steps` limits
    the number of steps. Raises ConfigError, which names the file and what is wrong with it or with the choice; a step
    that names an expert twice in one layer is wrong as well.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            arrays = load_arrays(file, opened)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; give a file of recorded routing") from error
    if "ids" not in arrays:
        raise ConfigError(f"{file}: it holds {', '.join(arrays) or 'nothing'}, but no `ids`")
    ids, offsets = checked_ids(file, arrays)
    begin, end = _bounds(file, offsets, len(ids), sequence)
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"{steps} steps of {file} were asked for; ask for 1 or more")
        end = min(end, begin + steps)
    chosen = ids[begin:end]
    if int(chosen.min()) < 0 or int(chosen.max()) >= MOST_EXPERTS:
        raise ConfigError(
            f"{file}: experts {int(chosen.min())} to {int(chosen.max())} are named; ids count from 0 and stay "
            f"below {MOST_EXPERTS}"
        )
    experts = np.ascontiguousarray(chosen, np.int32)
    ordered = np.sort(experts, axis=2)
    twice = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if len(twice):
        step, layer, place = twice[0].tolist()
        raise ConfigError(
            f"{file}: step {begin + step} names expert {ordered[step, layer, place]} twice in layer {layer}; "
            "the experts of a step are different ones"
        )
    return experts


def _bounds(
    file: Path, offsets: npt.NDArray[Any] | None, n_steps: int, sequence: int | None
) -> tuple[int, int]:
    """Return the first step, and the step after the last, of one sequence or of all sequences."""
    bounds = np.array([0, n_steps]) if offsets is None else offsets.astype(np.int64)
    if sequence is None:
        return 0, n_steps
    if not 0 <= sequence < len(bounds) - 1:
        raise ConfigError(
            f"sequence {sequence} of {file} was asked for; it has {len(bounds) - 1}, counted from 0"
        )
    begin, end = int(bounds[sequence]), int(bounds[sequence + 1])
    if begin == end:
        raise ConfigError(f"sequence {sequence} of {file} has no steps; choose another")
    return begin, end
