"""GGUFs written field by field, so that any of them can be wrong; gguf.GGUFWriter writes only good ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from expertier.tiers.model.table import ExpertTable
from expertier.units import round_up

MAGIC = b"GGUF"
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
Number = int | float
U64 = (1 << 64) - 1


def text(value: bytes, length: int | None = None) -> bytes:
    """A string with its length, or with another length."""
    return struct.pack("<Q", len(value) if length is None else length) + value


def scalar(kind: GGUFValueType, value: Number) -> bytes:
    """A scalar's bytes."""
    return struct.pack("<" + _SCALARS[kind], value)


@dataclass
class RawValue:
    """A key with its value: the number of its type, and the bytes that follow."""

    key: bytes
    kind: int
    payload: bytes

    def encode(self) -> bytes:
        """As it lies in the file."""
        return text(self.key) + struct.pack("<I", self.kind) + self.payload


@dataclass
class RawTensor:
    """A tensor's entry; `offset` counts from where the data begins."""

    name: bytes
    dims: list[int]
    kind: int = 0
    offset: int = 0
    n_dims: int | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of its data, for a type that is known."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        total = size
        for i, dim in enumerate(self.dims):
            total *= dim // block if i == 0 else dim
        return total

    def encode(self) -> bytes:
        """As it lies in the file."""
        n_dims = len(self.dims) if self.n_dims is None else self.n_dims
        dims = struct.pack(f"<{len(self.dims)}Q", *(dim & U64 for dim in self.dims))
        return (
            text(self.name)
            + struct.pack("<I", n_dims)
            + dims
            + struct.pack("<IQ", self.kind, self.offset & U64)
        )


@dataclass
class RawGguf:
    """A file; counts and the number of data bytes follow from what it holds unless they are given."""

    values: list[RawValue] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    n_values: int | None = None
    n_tensors: int | None = None
    data_bytes: int | None = None

    def set_number(self, key: str, value: Number, kind: GGUFValueType = GGUFValueType.UINT32) -> None:
        """Add a scalar."""
        self.values.append(RawValue(key.encode(), kind, scalar(kind, value)))

    def set_text(self, key: str, value: bytes) -> None:
        """Add a string."""
        self.values.append(RawValue(key.encode(), GGUFValueType.STRING, text(value)))

    def place(self) -> None:
        """Give the tensors their offsets, one after another."""
        end = 0
        for tensor in self.tensors:
            tensor.offset = end
            end = round_up(end + tensor.n_bytes, self.alignment)

    def header(self) -> bytes:
        """Everything before the data, padded."""
        n_values = len(self.values) if self.n_values is None else self.n_values
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        start = MAGIC + struct.pack("<IQQ", self.version, n_tensors & U64, n_values & U64)
        whole = start + b"".join(part.encode() for part in (*self.values, *self.tensors))
        return whole.ljust(round_up(len(whole), min(max(self.alignment, 1), 1 << 16)), b"\0")

    def encode(self) -> bytes:
        """The file."""
        header = self.header()
        n_bytes = self.data_bytes
        if n_bytes is None:
            n_bytes = max((tensor.offset + tensor.n_bytes for tensor in self.tensors), default=0)
        return header + (bytes(range(251)) * 523)[:n_bytes]


def expert_tensors(
    block: int, n_experts: int = 4, roles: Sequence[str] = ("gate", "up", "down")
) -> list[RawTensor]:
    """The experts of one block, Q8_0 and small."""
    kind = int(GGMLQuantizationType.Q8_0)
    return [
        RawTensor(f"blk.{block}.ffn_{role}_exps.weight".encode(), [32, 2, n_experts], kind) for role in roles
    ]


def good_model(n_blocks: int = 2, roles: Sequence[str] = ("gate", "up", "down")) -> RawGguf:
    """A model that the table accepts, of a few hundred bytes of header and some kilobytes of data."""
    raw = RawGguf()
    raw.set_text("general.architecture", b"qwen3moe")
    raw.set_number("qwen3moe.expert_used_count", 2)
    raw.values.append(
        RawValue(
            b"tokenizer.ggml.tokens",
            GGUFValueType.ARRAY,
            struct.pack("<IQ", GGUFValueType.STRING, 2) + text(b"a") + text("é".encode()),
        )
    )
    raw.values.append(
        RawValue(b"some.numbers", GGUFValueType.ARRAY, struct.pack("<IQ3h", GGUFValueType.INT16, 3, 1, 2, 3))
    )
    raw.tensors.append(RawTensor(b"token_embd.weight", [8, 3]))
    for block in range(n_blocks):
        raw.tensors.append(RawTensor(f"blk.{block}.ffn_norm.weight".encode(), [8]))
        raw.tensors += expert_tensors(block, roles=roles)
    raw.place()
    return raw


def split(raw: RawGguf, n_shards: int) -> list[RawGguf]:
    """The model as shards: all values in the first one, the tensors in turn."""
    shards = []
    for number in range(n_shards):
        shard = RawGguf(values=list(raw.values) if number == 0 else [], alignment=raw.alignment)
        shard.set_number("split.no", number, GGUFValueType.UINT16)
        shard.set_number("split.count", n_shards, GGUFValueType.UINT16)
        shard.set_number("split.tensors.count", len(raw.tensors), GGUFValueType.INT32)
        shard.tensors = raw.tensors[number::n_shards]
        shard.place()
        shards.append(shard)
    return shards


def write_files(folder: Path, contents: Sequence[bytes]) -> Path:
    """Write a model of one file or of several under the names of shards; return the first one's path."""
    if len(contents) == 1:
        paths = [folder / "model.gguf"]
    else:
        paths = [folder / f"model-{i + 1:05d}-of-{len(contents):05d}.gguf" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths[0]


def split_at_magic(data: bytes) -> list[bytes]:
    """Take one file for each GGUF that begins in `data`: how a fuzzer's bytes become shards."""
    begins = [0]
    while (found := data.find(MAGIC + b"\x03\0\0\0", begins[-1] + 4)) > 0:
        begins.append(found)
    return [data[begin:end] for begin, end in zip(begins, [*begins[1:], len(data)], strict=True)]


def table_of(folder: Path, *contents: bytes) -> ExpertTable:
    """The table of a model of these files."""
    return ExpertTable.from_gguf(write_files(folder, contents))
