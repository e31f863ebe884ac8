"""CuPy beside expertier: device memory as CuPy arrays, and slabs in CuPy's memory.

CuPy is not a dependency: its wheels for ROCm and for CUDA install the same package, so users pick one of them, as
`expertier[rocm]` or `expertier[cuda]`. A `GpuDevice` takes CuPy's streams as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from expertier.errors import DeviceError
from expertier.hip.driver.memory import PAGE_BYTES


def load_cupy() -> Any:
    """Return the module `cupy`. Raises `DeviceError` where it is not installed or finds no driver."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            f"CuPy cannot be imported ({error}): install expertier[rocm] or expertier[cuda], one of them"
        ) from error


def as_cupy(
    address: int,
    shape: Sequence[int],
    dtype: npt.DTypeLike = np.uint8,
    *,
    strides: Sequence[int] | None = None,
    owner: object = None,
    ordinal: int = 0,
) -> Any:
    """Return device memory as a `cupy.ndarray` of `shape`, without a copy.

    `strides` are in bytes, by default those of a contiguous array. A layer's slots, which have gaps between them, are
    `shape=(slots, bytes)` with `strides=(slot_stride, 1)`. The array keeps the object `owner` alive. It does not keep
    the memory from being freed or moved, so the caller has to see to that.
    """
    cupy = load_cupy()
    kind = np.dtype(dtype)
    steps = tuple(strides) if strides is not None else _contiguous(shape, kind.itemsize)
    if min(steps, default=0) < 0 or min(shape, default=1) < 0:
        raise ValueError(f"shape {tuple(shape)} and strides {steps} must not be negative")
    last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    n_bytes = 0 if 0 in shape else last + kind.itemsize
    memory = cupy.cuda.UnownedMemory(address, n_bytes, owner, device_id=ordinal)
    return cupy.ndarray(tuple(shape), kind, cupy.cuda.MemoryPointer(memory, 0), strides=steps)


class SlotsView(Protocol):
    """One matrix of all slots of a layer, in device memory, such as `Lease.view` returns.

    The matrix of slot `i` begins at `address + i * stride_bytes` and has `matrix_bytes`. `shape` is (ne0, ne1, number
    of slots) in elements, the fastest dimension first.
    """

    @property
    def address(self) -> int:
        """The address of slot 0's matrix."""

    @property
    def stride_bytes(self) -> int:
        """The distance from one slot to the next, in bytes."""

    @property
    def matrix_bytes(self) -> int:
        """The bytes of one slot's matrix."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(ne0, ne1, number of slots)."""


def slots_as_cupy(
    view: SlotsView, dtype: npt.DTypeLike | None = None, *, owner: object = None, ordinal: int = 0
) -> Any:
    """Return a matrix of all slots as a `cupy.ndarray`, without a copy and without the gaps between the matrices.

    Without `dtype` the array is uint8 [slots, matrix_bytes], with quantisation blocks as the model has them. With the
    element type of the matrix as `dtype` it is [slots, ne1, ne0]; raises `ValueError` where the sizes do not match. The
    array keeps `owner` alive, as `as_cupy` does; only a lease keeps the slots where they are.
    """
    ne0, ne1, slots = view.shape
    if dtype is None:
        shape: tuple[int, ...] = (slots, view.matrix_bytes)
        strides: tuple[int, ...] = (view.stride_bytes, 1)
    else:
        size = np.dtype(dtype).itemsize
        if ne0 * ne1 * size != view.matrix_bytes:
            raise ValueError(
                f"asked for a matrix of {ne1} rows of {ne0} as {np.dtype(dtype)}: that would be {ne0 * ne1 * size} "
                f"bytes and it has {view.matrix_bytes}; leave dtype out for quantised matrices, which come as bytes"
            )
        shape, strides = (slots, ne1, ne0), (view.stride_bytes, ne0 * size, size)
    return as_cupy(view.address, shape, dtype or np.uint8, strides=strides, owner=owner, ordinal=ordinal)


def _contiguous(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    steps = [item_bytes]
    for n in reversed(shape[1:]):
        steps.append(steps[-1] * n)
    return tuple(reversed(steps))[-len(shape) :] if shape else ()


class CupyAllocation:
    """Memory of a CuPy pool, aligned to a page."""

    def __init__(self, pointer: Any, n_bytes: int) -> None:
        """Keep CuPy's `pointer`, behind which at least `n_bytes` are usable from `address` on."""
        self._pointer = pointer
        self.n_bytes = n_bytes
        self.address = -(-int(pointer.ptr) // PAGE_BYTES) * PAGE_BYTES

    def close(self) -> None:
        """Give the memory back to CuPy."""
        self._pointer = None


class CupyAllocator:
    """An `Allocator` for `GpuDevice(gpu, allocator=...)` that takes memory from CuPy, so that both share one pool."""

    def __init__(self, ordinal: int = 0, allocate: Any = None) -> None:
        """Allocate on GPU `ordinal` with `allocate`, by default `cupy.cuda.alloc`. Raises `DeviceError`."""
        self._cupy = load_cupy()
        self._ordinal = ordinal
        self._allocate = allocate or self._cupy.cuda.alloc

    def allocate(self, n_bytes: int) -> CupyAllocation:
        """Return `n_bytes` of CuPy's memory, aligned to a page. Raises `DeviceError` where CuPy has no memory left."""
        try:
            with self._cupy.cuda.Device(self._ordinal):
                # One page more, to align to a page: CuPy aligns to 512 bytes only.
                return CupyAllocation(self._allocate(n_bytes + PAGE_BYTES), n_bytes)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise DeviceError(
                f"asked CuPy for {n_bytes + PAGE_BYTES} bytes: {error}; lower the budgets"
            ) from error
