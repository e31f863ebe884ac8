"""Archives of arrays, each written completely or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.atomic_file import output


def write_archive(path: str | os.PathLike[str], arrays: Mapping[str, npt.NDArray[Any]], what: str) -> None:
    """Write a compressed .npz; `what` names its content in the error.

    Raises ConfigError where the file cannot be written; an earlier file of that name then stays.
    """
    assert not any(array.dtype.hasobject for array in arrays.values()), "objects would be pickled"
    # Packed in memory first: where the disk is full, NumPy's own writing ends in errors about the archive.
    packed = io.BytesIO()
    # Not `allow_pickle=False`: an older NumPy writes that as one more array; a newer one's types expect it.
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    with output(path, what) as unfinished, unfinished.open("xb") as opened:
        opened.write(packed.getbuffer())


def smallest(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers in the smallest type that holds them."""
    if not numbers.size:
        return numbers.astype(np.uint8)
    low, high = int(numbers.min()), int(numbers.max())
    return numbers.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))
