"""The header of a GGUF file: its scalars and where its tensors lie.

Read here and not by the gguf package's reader, which maps the whole file, makes an array object for every
token of the vocabulary, and answers a damaged file with assorted errors or an endless loop. Every length is
checked against what the file still holds before it is believed. Names, keys, types and sizes are the gguf
package's tables.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertier.errors import NotGgufError, TruncatedModelError
from expertier.units import round_up

Scalar = int | float | bool | str

_MAX_DIMS = 4
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension
_MIN_VALUE_BYTES = 8 + 4 + 1  # an empty key, one byte
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry: `dims` as GGUF orders them (fastest first), `offset` from the start of the file."""

    name: str
    dims: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF says of itself; `values` holds its scalars and strings, arrays are skipped."""

    version: int
    values: dict[str, Scalar]
    tensors: tuple[TensorInfo, ...]
    file_stat: os.stat_result

    @property
    def architecture(self) -> str:
        """The model's architecture, "unknown" where the file does not say."""
        return str(self.values.get("general.architecture", "unknown"))


def read_header(path: Path) -> GgufHeader:
    """Read the header of `path`.

    Raises `NotGgufError` for what is no GGUF or contradicts itself, and `TruncatedModelError` where the file
    ends within its header.
    """
    try:
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            return _Reader(path, file).header()
    except IsADirectoryError as error:
        raise NotGgufError(f"{path} is a directory: give the GGUF file in it") from error
    except OSError as error:
        raise NotGgufError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor in a GGUF's header."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        import gguf

        self._gguf = gguf
        self._path = path
        self._file = file
        self._stat = os.fstat(file.fileno())
        self._left = self._stat.st_size
        kind = gguf.GGUFValueType
        self._formats: dict[int, str] = {
            kind.UINT8: "<B",
            kind.INT8: "<b",
            kind.UINT16: "<H",
            kind.INT16: "<h",
            kind.UINT32: "<I",
            kind.INT32: "<i",
            kind.FLOAT32: "<f",
            kind.BOOL: "<?",
            kind.UINT64: "<Q",
            kind.INT64: "<q",
            kind.FLOAT64: "<d",
        }

    def header(self) -> GgufHeader:
        """Read everything up to the tensors' data."""
        version, n_tensors, n_values = self._preamble()
        values: dict[str, Scalar] = {}
        for _ in range(n_values):
            key = self._string("a key")
            value = self._value(key)
            if value is not None:
                values[key] = value
        alignment = values.get(self._gguf.Keys.General.ALIGNMENT, self._gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._malformed(f"its alignment is {alignment!r}, not a power of two")
        entries = [self._tensor(alignment) for _ in range(n_tensors)]
        names = {entry.name for entry in entries}
        if len(names) != len(entries):
            raise self._malformed("two of its tensors have the same name")
        data = round_up(self._stat.st_size - self._left, alignment)
        tensors = tuple(
            TensorInfo(entry.name, entry.dims, entry.ggml_type, data + entry.offset) for entry in entries
        )
        return GgufHeader(version, values, tensors, self._stat)

    def _preamble(self) -> tuple[int, int, int]:
        magic = self._gguf.GGUF_MAGIC.to_bytes(4, "little")
        size = self._stat.st_size
        start = self._file.read(4)
        self._left -= len(start)
        if start != magic:
            found = "nothing: the file is empty" if not start else f"{start!r}"
            if start and magic.startswith(start):
                raise TruncatedModelError(f"{self._path} has {size} bytes, less than a GGUF's header")
            raise NotGgufError(f"{self._path} is not a GGUF: it should begin with {magic!r}, found {found}")
        version = self._number("<I", "the version")
        if not version & 0xFFFF:
            raise NotGgufError(f"{self._path} is a big-endian GGUF: convert it for this machine")
        if version not in (2, self._gguf.GGUF_VERSION):
            raise NotGgufError(
                f"{self._path} is GGUF version {version}; known are 2 and {self._gguf.GGUF_VERSION}: "
                "convert it again with a current llama.cpp"
            )
        n_tensors = self._number("<Q", "the number of tensors")
        n_values = self._number("<Q", "the number of values")
        needed = n_tensors * _MIN_TENSOR_BYTES + n_values * _MIN_VALUE_BYTES
        if needed > self._left:
            raise TruncatedModelError(
                f"{self._path} says that it has {n_tensors} tensors and {n_values} values, at least {needed} "
                f"bytes of header, but only {self._left} bytes follow: download it again"
            )
        return version, n_tensors, n_values

    def _tensor(self, alignment: int) -> TensorInfo:
        name = self._string("a tensor's name")
        n_dims = self._number("<I", f"the dimensions of {name}")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._malformed(f"tensor {name} has {n_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = tuple(self._number("<Q", f"the shape of {name}") for _ in range(n_dims))
        if min(dims) < 1 or max(dims) >= 1 << 63:
            raise self._malformed(f"tensor {name} has the shape {list(dims)}")
        ggml_type = self._number("<I", f"the type of {name}")
        offset = self._number("<Q", f"the offset of {name}")
        if offset % alignment:
            raise self._malformed(f"tensor {name} lies at {offset}, not at a multiple of {alignment}")
        return TensorInfo(name, dims, ggml_type, offset)

    def _value(self, key: str) -> Scalar | None:
        """Read a value; None for an array, which is skipped."""
        kind = self._number("<I", f"the type of {key}")
        if kind == self._gguf.GGUFValueType.STRING:
            return self._string(f"the value of {key}")
        if kind != self._gguf.GGUFValueType.ARRAY:
            return self._scalar(kind, key)
        item_kind = self._number("<I", f"the item type of {key}")
        n_items = self._number("<Q", f"the length of {key}")
        if item_kind == self._gguf.GGUFValueType.STRING:
            self._need(8 * n_items, f"the items of {key}")
            for _ in range(n_items):
                self._skip(self._number("<Q", f"an item of {key}"), f"an item of {key}")
        elif item_kind in self._formats:
            self._skip(n_items * struct.calcsize(self._formats[item_kind]), f"the items of {key}")
        else:
            raise self._malformed(f"{key} is an array of the unknown type {item_kind}")
        return None

    def _scalar(self, kind: int, key: str) -> Scalar:
        if kind not in self._formats:
            raise self._malformed(f"{key} has the unknown type {kind}")
        return self._number(self._formats[kind], f"the value of {key}")

    def _string(self, what: str) -> str:
        raw = self._take(self._number("<Q", f"the length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._malformed(f"{what} is not UTF-8: {raw[:40]!r}") from error

    def _number(self, form: str, what: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form), what))
        return value  # type: ignore[no-any-return]  # struct's formats are not typed

    def _take(self, n_bytes: int, what: str) -> bytes:
        self._need(n_bytes, what)
        raw = self._file.read(n_bytes)
        self._left -= len(raw)
        if len(raw) != n_bytes:
            raise TruncatedModelError(f"{self._path} became shorter while its header was read, at {what}")
        return raw

    def _skip(self, n_bytes: int, what: str) -> None:
        self._need(n_bytes, what)
        self._file.seek(n_bytes, os.SEEK_CUR)
        self._left -= n_bytes

    def _need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self._left:
            raise TruncatedModelError(
                f"{self._path} ends within {what}: {n_bytes} bytes are needed there and {self._left} are "
                f"left of {self._stat.st_size}; download it again"
            )

    def _malformed(self, what: str) -> NotGgufError:
        return NotGgufError(f"{self._path} is a damaged GGUF: {what}; download it again")
