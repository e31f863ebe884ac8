"""Reads the plain text form of a profile: how much of the routing each layer has.

    blk.0 0.91
    blk.1 1.4      # the rest of a line is a comment

`<layer>` is the layer's number in the model. The form says nothing of single experts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from expertier.errors import ConfigError

_START_BYTES = 1 << 16
_LINE = re.compile(r"blk\.(?P<block>[0-9]{1,6})\s+(?P<weight>\S+)")


def looks_like_weights(path: str | os.PathLike[str]) -> bool:
    """Whether the first line that is neither empty nor a comment begins as a line of this form.

    Raises ConfigError where the file cannot be read.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            for line in opened.read(_START_BYTES).splitlines():
                said = line.split(b"#", 1)[0].strip()
                if said:
                    return said.startswith(b"blk.")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; give a file with a routing profile") from error
    return False


def read_layer_weights(path: str | os.PathLike[str]) -> dict[int, float]:
    """Return the weight of each block that the file names, in its order.

    Raises ConfigError, with the number of the line, for another form, a weight that is negative or not a finite number,
    and a block that is named twice; also where no line names a block, or the file cannot be read.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not text; a profile has lines of `blk.<layer> <weight>`") from error
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror or error}; give a file with `blk.<layer> <weight>`"
        ) from error
    weights: dict[int, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = line.split("#", 1)[0].strip()
        if not said:
            continue
        where = f"{file}, line {number}"
        match = _LINE.fullmatch(said)
        if match is None:
            raise ConfigError(f"{where}: {said!r}; a line is `blk.<layer> <weight>`, such as `blk.12 0.8`")
        block = int(match["block"])
        if block in weights:
            raise ConfigError(f"{where}: blk.{block} has a weight already, {weights[block]}; give it once")
        weights[block] = _weight(where, match["weight"])
    if not weights:
        raise ConfigError(f"{file}: no line of `blk.<layer> <weight>`; the profile is empty")
    return weights


def weights_of(weights: dict[int, float], blocks: Sequence[int]) -> tuple[float, ...]:
    """Return the weights of the layers with these numbers: a `LayerDemand`'s `weight`, one a layer.

    Raises ConfigError where a layer has no weight, or a weight is for a block that is not among these layers.
    """
    missing = [block for block in blocks if block not in weights]
    unknown = [block for block in weights if block not in set(blocks)]
    if missing or unknown:
        raise ConfigError(
            f"the profile has weights of {len(weights)} layers, this model {len(blocks)} layers with experts: "
            f"blk. {missing} without a weight, blk. {unknown} not in the model; make it from this model"
        )
    return tuple(weights[block] for block in blocks)


def _weight(where: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"{where}: the weight is {text!r}; it is a finite number of 0 or more")
    return weight
