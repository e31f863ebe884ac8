"""The header of a GGUF file, through the gguf package's reader: its scalars and where its tensors lie.

The reader maps the file and believes every length in it. Here each of its reads is checked against the file's end
first, so that a cut or damaged file is one of our errors and never a loop, a huge allocation or an assorted NumPy
error; arrays, such as a vocabulary, and long strings are skipped; and bytes are read, not taken from the map, because
touching the map of a file that another program cuts meanwhile would end the process. Nor does it believe in more
header than the file has bytes on disk: a sparse file of 4 KiB could claim billions of empty strings in its hole.
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
_MAX_TENSORS = 1 << 16  # an object each; a model has some thousand
_MAX_VALUES = 1 << 14  # likewise; a model has some dozen
_MAX_NAME_BYTES = 1024  # of a key, a tensor's name, a string that is kept
_MAX_STRINGS = 1 << 22  # in arrays, of all of them; a vocabulary and its merges have less than a million
_MAX_ALIGNMENT = 1 * MIB  # the merged header of shards is padded to it
_WINDOW_BYTES = 64 * KIB
_MIN_ITEM_BYTES = 8  # of an array of strings: each has a length
_VERSIONS = (2, GGUF_VERSION)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry: `dims` as GGUF orders them (fastest first), `offset` from the start of the file.

    `block` is a block of its type, None where the type is not known.
    """

    name: str
    dims: tuple[int, ...]
    ggml_type: int
    offset: int
    block: BlockSize | None

    @property
    def n_bytes(self) -> int | None:
        """Bytes of the data; None for a type that is not known, and for rows that are no whole blocks."""
        if self.block is None or self.dims[0] % self.block.elements:
            return None
        return self.dims[0] // self.block.elements * self.block.n_bytes * math.prod(self.dims[1:])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF says of itself.

    `values` holds its scalars and short strings, bytes in them that are no UTF-8 replaced; arrays and texts of
    more than 1024 bytes, such as a chat template, are left out. `value_spans` says for every key, arrays too,
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


def read_header(path: Path, type_sizes: TypeSizes = PACKAGE_TYPES) -> GgufHeader:
    """Read the header of `path`; `type_sizes` says what its tensors take.

    Raises `NotGgufError` for what is no GGUF or contradicts itself, and `TruncatedModelError` where the file
    ends before its header, or before the data of a tensor.
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
    """Return the version of the GGUF; refuse what does not begin as one that we read."""
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
    """The gguf package's reader, over a file that may end anywhere and may be cut while it is read."""

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
        """Read all keys and values, and note where each one lies."""
        end = int(super()._build_fields(offs, count))
        begins = sorted((field.offset, name) for name, field in self.fields.items() if field.offset >= offs)
        ends = [*(begin for begin, _ in begins), end][1:]
        self.value_spans = {name: (begin, stop) for (begin, name), stop in zip(begins, ends, strict=True)}
        return end

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
        """Read the tensors' entries; a few hundred bytes of memory each, where the package takes thousands."""
        end = int(offs)
        for _ in range(int(count)):
            name_bytes = self._name(end)
            name = name_bytes.decode()
            end += 8 + len(name_bytes)
            if not name.isprintable():  # messages show it, and a terminal would obey it
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
        """Take over the tensors' entries; their data is not looked at, and their types may be unknown here."""
        alignment = int(self.alignment)  # NumPy's, of 32 bits, would overflow beyond 4 GiB
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
        """Return `count` items at `offset`; the package's only way to the file."""
        return np.frombuffer(self._read(int(offset), int(count) * np.dtype(dtype).itemsize), dtype)

    def _get_str(self, offset: int) -> Any:
        """Return (length, bytes) of a key, or of a string that is kept."""
        name = np.frombuffer(self._name(int(offset)), np.uint8)
        return np.array([len(name)], np.uint64), name

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Return (bytes, parts, indices, types) of a value; an array has no parts, a long string no types either."""
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
        """Return where an array of strings ends; a vocabulary may have some hundred thousand."""
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
        """Return bytes of the file; `n_bytes` is small, and many reads follow each other closely."""
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
        # A header takes disk: as many bytes as it has, at least, or it is none, and reading it would have no end.
        if not self._data.has(offset + n_bytes):
            raise TruncatedModelError(
                f"{self._path} is not all there: its header goes on until {offset + n_bytes} at least, but of its "
                f"{self._size} bytes only {self._data.found} are on disk, the others are holes; download it again"
            )
