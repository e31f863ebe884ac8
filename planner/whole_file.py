"""Archives of arrays that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError


def write_archive(path: str | os.PathLike[str], arrays: Mapping[str, npt.NDArray[Any]], what: str) -> None:
    """Write a compressed .npz; `what` names its content in the error.

    Raises ConfigError where the file cannot be written; what was there before then stays.
    """
    assert not any(array.dtype.hasobject for array in arrays.values()), "objects would be pickled"
    file = Path(path)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.unfinished")
    try:
        try:
            with unfinished.open("xb") as opened:
                # Not `allow_pickle=False`: an older NumPy writes that as one more array; a newer one's types expect it.
                np.savez_compressed(opened, **arrays)  # type: ignore[arg-type]
            unfinished.replace(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written to {file}: {error.strerror or error}; give a file in a folder "
            "that exists and can be written to"
        ) from error


def smallest(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers in the smallest type that holds them."""
    if not numbers.size:
        return numbers.astype(np.uint8)
    low, high = int(numbers.min()), int(numbers.max())
    return numbers.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))
