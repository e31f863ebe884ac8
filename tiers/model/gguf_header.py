"""Reads the header of a GGUF file with the gguf package's reader: its scalars, and where its tensors lie.

The package's reader maps the file into memory and trusts every length in it. The class here changes that in four ways:

- Each read is checked against the end of the file first. A truncated or damaged file then raises one of our errors;
  otherwise it could cause an endless loop, a huge allocation or some error of NumPy's.
- Arrays, such as a vocabulary, and long strings are skipped.
- Bytes are read and not taken from the map: where another program truncates the file meanwhile, touching the map would
  end the process.
- The header may not be longer than the file has bytes on disk. Otherwise a sparse file of 4 KiB could claim to have
  billions of empty strings in its hole.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUF_MAGIC, GGUF_VERSION, GGUFReader, GGUFValueType

from expertier.errors import NotGgufError, TruncatedModelError
from expertier.tiers.model.data_on_disk import DataOnDisk
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, BlockSize, TypeSizes
from expertier.units import KIB, MIB, round_up

Scalar = int | float | bool | str

_MIN_HEADER_BYTES = 4 + 4 + 8 + 8  # magic, version, two counts
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension
_MIN_VALUE_BYTES = 8 + 4 + 1  # an empty key, one byte
_MAX_DIMS = 4
_MAX_TENSORS = 1 << 16  # each takes an object; a model has some thousand
_MAX_VALUES = 1 << 14  # each takes an object; a model has some dozen
_MAX_NAME_BYTES = 1024  # the longest key, name of a tensor, or string value that is kept
_MAX_STRINGS = 1 << 22  # in all arrays together; a vocabulary and its merges have less than a million
_MAX_ALIGNMENT = 1 * MIB  # the merged header of shards is padded to the alignment
_WINDOW_BYTES = 64 * KIB
_MIN_ITEM_BYTES = 8  # an item of an array of strings has a length, at least
_VERSIONS = (2, GGUF_VERSION)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in the header.

    `dims` are in GGUF's order, the fastest first. `offset` counts bytes from the start of the file. `block` is the size
    of a block of the tensor's type; None where the type is not known.
    """

    name: str
    dims: tuple[int, ...]
    ggml_type: int
    offset: int
    block: BlockSize | None

    @property
    def n_bytes(self) -> int | None:
        """The bytes of the data; None where the type is not known, or a row is not a whole number of blocks."""
        if self.block is None or self.dims[0] % self.block.elements:
            return None
        return self.dims[0] // self.block.elements * self.block.n_bytes * math.prod(self.dims[1:])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of a GGUF's header.

    `values` holds scalars and strings. Bytes of strings that are not UTF-8 are replaced; arrays and strings of more
    than 1024 bytes, such as a chat template, are left out. `value_spans` has for every key, also those of arrays, the
    [begin, end) of key and value in the file. The data of tensors begins at multiples of `alignment` bytes.
    """

    version: int
    values: dict[str, Scalar]
    value_spans: dict[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    file_stat: os.stat_result

    @property
    def architecture(self) -> str:
        """The model's architecture; "unknown" where the file does not name it."""
        return str(self.values.get("general.architecture", "unknown"))


def read_header(path: Path, type_sizes: TypeSizes = PACKAGE_TYPES) -> GgufHeader:
    """Read the header of the GGUF at `path`; `type_sizes` has the block sizes of the tensors' types.

    Raises `NotGgufError` for a file that is no GGUF or whose header contradicts itself, and `TruncatedModelError` for a
    file that ends within its header.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for its writer
            what = "a directory: give the GGUF file in it" if path.is_dir() else "no file: give a GGUF file"
            raise NotGgufError(f"{path} is {what}")
        with open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            data = DataOnDisk(file.fileno(), before.st_size)
            version = _check_start(path, file.read(_MIN_HEADER_BYTES), before.st_size)
            reader = _CheckedReader(path, file.fileno(), data, type_sizes)
        after = path.stat()
    except OSError as error:
        raise NotGgufError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, OverflowError, IndexError) as error:  # the reader's own refusals
        raise NotGgufError(f"{path} is a damaged GGUF: {error}; download it again") from error
    change = FileIdentity.of(before).difference(FileIdentity.of(after))
    if change is not None:
        raise NotGgufError(
            f"{path} changed while its header was read: {change}; try again when it is complete"
        )
    values = {
        name: field.contents() if field.types[0] != GGUFValueType.STRING else _text(field.parts[-1].tobytes())
        for name, field in reader.fields.items()
        if field.types and field.types[0] != GGUFValueType.ARRAY
    }
    architecture = values.get("general.architecture")
    if isinstance(architecture, str) and not architecture.isprintable():
        raise NotGgufError(
            f"{path} is a damaged GGUF: its architecture is {architecture!r}; download it again"
        )
    return GgufHeader(
        version, values, reader.value_spans, tuple(reader.entries), int(reader.alignment), before
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _check_start(path: Path, start: bytes, size: int) -> int:
    """Return the version of the GGUF; raise where the file does not begin as a GGUF of a version that we read."""
    magic = struct.pack("<I", GGUF_MAGIC)
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
    if n_tensors > _MAX_TENSORS or n_values > _MAX_VALUES:
        raise NotGgufError(
            f"{path} has {n_tensors} tensors and {n_values} values; at most {_MAX_TENSORS} and {_MAX_VALUES} are read: "
            "it is damaged or no model; download it again"
        )
    return int(version)


class _CheckedReader(GGUFReader):
    """The gguf package's reader, for a file that may be truncated anywhere, even while it is read."""

    def __init__(self, path: Path, descriptor: int, data: DataOnDisk, type_sizes: TypeSizes) -> None:
        self._path = path
        self._type_sizes = type_sizes
        self._descriptor = descriptor
        self._size = data.size
        self._data = data
        self._n_strings = 0
        self._window = b""
        self._window_begin = 0
        self._header_end = 0
        self._raw_entries: list[tuple[str, tuple[int, ...], int, int]] = []
        self.entries: list[TensorInfo] = []
        self.value_spans: dict[str, tuple[int, int]] = {}
        super().__init__(path)

    def _build_fields(self, offs: int, count: int) -> int:
        """Read all keys and values, and note where each pair lies in the file."""
        end = int(super()._build_fields(offs, count))
        begins = sorted((field.offset, name) for name, field in self.fields.items() if field.offset >= offs)
        ends = [*(begin for begin, _ in begins), end][1:]
        self.value_spans = {name: (begin, stop) for (begin, name), stop in zip(begins, ends, strict=True)}
        return end

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
        """Read the tensors' entries. Each takes a few hundred bytes of memory; the package's take thousands."""
        end = int(offs)
        for _ in range(int(count)):
            name_bytes = self._name(end)
            name = name_bytes.decode()
            end += 8 + len(name_bytes)
            if not name.isprintable():  # messages show it, and a terminal would obey its control codes
                raise ValueError(f"it has a tensor named {name!r}")
            (n_dims,) = struct.unpack("<I", self._read(end, 4))
            if not 1 <= n_dims <= _MAX_DIMS:
                raise ValueError(f"tensor {name} has {n_dims} dimensions, not 1 to {_MAX_DIMS}")
            *dims, kind, offset = struct.unpack(f"<{n_dims}QIQ", self._read(end + 4, 8 * n_dims + 12))
            end += 4 + 8 * n_dims + 12
            self._raw_entries.append((name, tuple(dims), kind, offset))
        self._header_end = end
        return end, []

    def _build_tensors(self, start_offs: int, fields: Any) -> None:  # noqa: ARG002
        """Check the tensors' entries and keep them. Their data is not looked at, and their types may be unknown."""
        alignment = int(self.alignment)  # NumPy's integer of 32 bits would overflow beyond 4 GiB
        if alignment > _MAX_ALIGNMENT:
            raise ValueError(f"its alignment is {alignment}, more than {_MAX_ALIGNMENT}")
        begin = round_up(self._header_end, alignment)
        names = set()
        for name, dims, kind, offset in self._raw_entries:
            if min(dims) < 1 or max(dims) >= 1 << 63:
                raise ValueError(f"tensor {name} has the shape {list(dims)}")
            if offset % alignment:
                raise ValueError(f"tensor {name} lies at {offset}, not at a multiple of {alignment}")
            if name in names:
                raise ValueError(f"two of its tensors have the same name {name}")
            names.add(name)
            self.entries.append(TensorInfo(name, dims, kind, begin + offset, self._type_sizes.block(kind)))

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:  # noqa: ARG002
        """Return `count` items at `offset`. The package reads the file through this method only."""
        return np.frombuffer(self._read(int(offset), int(count) * np.dtype(dtype).itemsize), dtype)

    def _get_str(self, offset: int) -> Any:
        """Return (length, bytes) of a key, or of a string value that is kept."""
        name = np.frombuffer(self._name(int(offset)), np.uint8)
        return np.array([len(name)], np.uint64), name

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Return (bytes, parts, indices, types) of a value; an array gets no parts, a long string no types either."""
        if int(raw_type) == GGUFValueType.STRING:
            end = self._end_of_strings(orig_offs, 1)
            if end - orig_offs > 8 + _MAX_NAME_BYTES:
                return end - orig_offs, [], [], []
        if int(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        number, n_items = struct.unpack("<IQ", self._read(orig_offs, 4 + 8))
        item_type = GGUFValueType(number)
        begin = orig_offs + 4 + 8
        if item_type == GGUFValueType.STRING:
            end = self._end_of_strings(begin, n_items)
        elif item_type in self.gguf_scalar_to_np:
            end = begin + n_items * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
            self._require(orig_offs, end - orig_offs)
        else:
            raise ValueError(f"it has an array of {item_type.name}")
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, item_type]

    def _name(self, offset: int) -> bytes:
        length = int.from_bytes(self._read(offset, 8), "little")
        self._require(offset + 8, length)
        if length > _MAX_NAME_BYTES:
            raise ValueError(f"it has a name of {length} bytes, more than {_MAX_NAME_BYTES}")
        return self._read(offset + 8, length)

    def _end_of_strings(self, begin: int, n_items: int) -> int:
        """Return where an array of strings ends. It may be long: a vocabulary has some hundred thousand strings."""
        self._require(begin, n_items * _MIN_ITEM_BYTES)
        self._n_strings += n_items
        if self._n_strings > _MAX_STRINGS:
            raise ValueError(
                f"its arrays have {self._n_strings} strings or more, at most {_MAX_STRINGS} are read"
            )
        size, offset = self._size, begin
        for _ in range(n_items):
            if offset + _MIN_ITEM_BYTES > size:
                break
            offset += _MIN_ITEM_BYTES + int.from_bytes(self._read(offset, 8), "little")
        self._require(begin, offset - begin)
        return offset

    def _read(self, offset: int, n_bytes: int) -> bytes:
        """Return `n_bytes` at `offset`, from a window that is read at once: most reads are small and close together."""
        at = offset - self._window_begin
        if not 0 <= at <= len(self._window) - n_bytes:
            self._require(offset, n_bytes)
            self._window = os.pread(self._descriptor, max(n_bytes, _WINDOW_BYTES), offset)
            self._window_begin, at = offset, 0
            if len(self._window) < n_bytes:
                raise TruncatedModelError(
                    f"{self._path} was cut while its header was read; download it again"
                )
        return self._window[at : at + n_bytes]

    def _require(self, offset: int, n_bytes: int) -> None:
        if offset + n_bytes > self._size:
            raise TruncatedModelError(
                f"{self._path} is cut short: it needs the bytes {offset} to {offset + n_bytes}, the file ends at "
                f"{self._size}; download it again"
            )
        # A true header lies on disk with all of its bytes. A longer one lies in a hole, and reading it might never end.
        if not self._data.has(offset + n_bytes):
            raise TruncatedModelError(
                f"{self._path} is not all there: its header goes on until {offset + n_bytes} at least, but of its "
                f"{self._size} bytes only {self._data.found} are on disk, the rest are holes; download it again"
            )
