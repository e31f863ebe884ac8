"""The header of a GGUF file, through the gguf package's reader: its scalars and where its tensors lie.

The reader maps the file and believes every length in it. Here each of its reads is checked against the file's end
first, so that a cut or damaged file is one of our errors and never a loop, a huge allocation or an assorted NumPy
error; and arrays, such as a vocabulary, stay bytes instead of becoming an object an item.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_MAGIC, GGUF_VERSION, GGUFReader, GGUFValueType

from expertier.errors import NotGgufError, TruncatedModelError

Scalar = int | float | bool | str

_MIN_HEADER_BYTES = 4 + 4 + 8 + 8  # magic, version, two counts
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension
_MIN_VALUE_BYTES = 8 + 4 + 1  # an empty key, one byte
_MAX_DIMS = 4
_MIN_ITEM_BYTES = 8  # of an array of strings: each has a length
_VERSIONS = (2, GGUF_VERSION)
_BLOCK_SIZES = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry: `dims` as GGUF orders them (fastest first), `offset` from the start of the file."""

    name: str
    dims: tuple[int, ...]
    ggml_type: int
    offset: int

    @property
    def n_bytes(self) -> int | None:
        """Bytes of the data; None for a type or row length that the gguf package does not know."""
        block_elements, block_bytes = _BLOCK_SIZES.get(self.ggml_type, (0, 0))
        if not block_elements or self.dims[0] % block_elements:
            return None
        return self.dims[0] // block_elements * block_bytes * math.prod(self.dims[1:])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF says of itself.

    `values` holds its scalars and strings, arrays are left out. `value_spans` says for every key, arrays too,
    which bytes of the file hold key and value. Data of tensors begins at multiples of `alignment`.
    """

    version: int
    values: dict[str, Scalar]
    value_spans: dict[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    file_stat: os.stat_result

    @property
    def architecture(self) -> str:
        """The model's architecture, "unknown" where the file does not say."""
        return str(self.values.get("general.architecture", "unknown"))


def read_header(path: Path) -> GgufHeader:
    """Read the header of `path`.

    Raises `NotGgufError` for what is no GGUF or contradicts itself, and `TruncatedModelError` where the file
    ends before its header, or before the data of a tensor.
    """
    try:
        before = path.stat()
        version = _check_start(path, before.st_size)
        reader = _CheckedReader(path)
        after = path.stat()
    except IsADirectoryError as error:
        raise NotGgufError(f"{path} is a directory: give the GGUF file in it") from error
    except OSError as error:
        raise NotGgufError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, OverflowError, IndexError) as error:  # the reader's own refusals
        raise NotGgufError(f"{path} is a damaged GGUF: {error}; download it again") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise NotGgufError(f"{path} was written to while its header was read; try again when it is complete")
    values = {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and field.types[0] != GGUFValueType.ARRAY
    }
    return GgufHeader(
        version, values, reader.value_spans, tuple(reader.entries), int(reader.alignment), before
    )


def _check_start(path: Path, size: int) -> int:
    """Return the version of the GGUF; refuse what does not begin as one that we read."""
    magic = struct.pack("<I", GGUF_MAGIC)
    with open(path, "rb") as file:
        start = file.read(_MIN_HEADER_BYTES)
    if not start or not magic.startswith(start[:4]):
        found = f"{start[:4]!r}" if start else "nothing: the file is empty"
        raise NotGgufError(
            f"{path} is not a GGUF: it should begin with {magic!r}, found {found}; give a model in GGUF format"
        )
    if len(start) < _MIN_HEADER_BYTES:
        raise TruncatedModelError(
            f"{path} has {size} bytes, less than the {_MIN_HEADER_BYTES} that a GGUF begins with; download it again"
        )
    (version,) = struct.unpack_from("<I", start, 4)
    if not version & 0xFFFF:
        raise NotGgufError(f"{path} is a big-endian GGUF: convert it for this machine")
    if version not in _VERSIONS:
        raise NotGgufError(
            f"{path} is GGUF version {version}; known are {' and '.join(map(str, _VERSIONS))}: convert it again "
            "with a current llama.cpp"
        )
    n_tensors, n_values = struct.unpack_from("<QQ", start, 8)
    needed = n_tensors * _MIN_TENSOR_BYTES + n_values * _MIN_VALUE_BYTES
    if needed > size - _MIN_HEADER_BYTES:
        raise TruncatedModelError(
            f"{path} is cut short: it says that it has {n_tensors} tensors and {n_values} values, at least {needed} "
            f"bytes of header, but only {size - _MIN_HEADER_BYTES} bytes follow; download it again"
        )
    return int(version)


class _CheckedReader(GGUFReader):
    """The gguf package's reader, over a file that may end anywhere."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[TensorInfo] = []
        self.value_spans: dict[str, tuple[int, int]] = {}
        super().__init__(path)

    def _build_fields(self, offs: int, count: int) -> int:
        """Read all keys and values, and note where each one lies."""
        end = int(super()._build_fields(offs, count))
        begins = sorted((field.offset, name) for name, field in self.fields.items() if field.offset >= offs)
        ends = [*(begin for begin, _ in begins), end][1:]
        self.value_spans = {name: (begin, stop) for (begin, name), stop in zip(begins, ends, strict=True)}
        return end

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        """Take over the tensors' entries; their data is not looked at, and their types may be unknown here."""
        names = set()
        for field in fields:
            _, raw_name, n_dims, raw_dims, raw_type, raw_offset = field.parts
            name = bytes(raw_name).decode()
            dims, offset = tuple(map(int, raw_dims)), int(raw_offset[0])
            if not 1 <= int(n_dims[0]) <= _MAX_DIMS:
                raise ValueError(f"tensor {name} has {n_dims[0]} dimensions, not 1 to {_MAX_DIMS}")
            if min(dims) < 1 or max(dims) >= 1 << 63:
                raise ValueError(f"tensor {name} has the shape {list(dims)}")
            if offset % self.alignment:
                raise ValueError(f"tensor {name} lies at {offset}, not at a multiple of {self.alignment}")
            if name in names:
                raise ValueError(f"two of its tensors have the same name {name}")
            names.add(name)
            self.entries.append(TensorInfo(name, dims, int(raw_type[0]), int(start_offs) + offset))

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Return `count` items at `offset`; the reader's only way to the file."""
        self._require(int(offset), int(count) * np.dtype(dtype).itemsize)
        return super()._get(int(offset), dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Return (bytes, parts, indices, types) of a value; an array is one part, its bytes."""
        if int(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        n_items = int(self._get(orig_offs + 4, np.uint64)[0])
        begin = orig_offs + 4 + 8
        if item_type == GGUFValueType.STRING:
            end = self._end_of_strings(begin, n_items)
        elif item_type in self.gguf_scalar_to_np:
            end = begin + n_items * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
        else:
            raise ValueError(f"it has an array of {item_type.name}")
        size = end - orig_offs
        return size, [self._get(orig_offs, np.uint8, size)], [0], [GGUFValueType.ARRAY, item_type]

    def _end_of_strings(self, begin: int, n_items: int) -> int:
        """Return where an array of strings ends; a vocabulary may have some hundred thousand."""
        self._require(begin, n_items * _MIN_ITEM_BYTES)
        view: memoryview = self.data.data
        size, offset = self.data.size, begin
        for _ in range(n_items):
            if offset + _MIN_ITEM_BYTES > size:
                break
            offset += _MIN_ITEM_BYTES + int.from_bytes(view[offset : offset + 8], "little")
        self._require(begin, offset - begin)
        return offset

    def _require(self, offset: int, n_bytes: int) -> None:
        if offset + n_bytes > self.data.size:
            raise TruncatedModelError(
                f"{self._path} is cut short: it needs the bytes {offset} to {offset + n_bytes}, the file ends at "
                f"{self.data.size}; download it again"
            )
