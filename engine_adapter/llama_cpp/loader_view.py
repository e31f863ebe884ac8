"""The view that the engine's loader has of a model's files: one GGUF in which no expert is ever read.

The loader takes one stream. A model of one file is shown as it is; shards are shown under a merged header, without
the keys that say that the model is split. Ranges of experts keep their places but are marked: there the stream reads
nothing, and leaves the loader's buffer as it was.

    file        [ header ][ tensors ][ experts ][ tensors ]
    shards      [ merged header ][ tensors of 1 ][ experts of 1 ][ tensors of 2 ] ...
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gguf import Keys

from expertier.errors import ModelError, UnsupportedLayoutError
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.file_shards import FileShard, read_file_shards
from expertier.tiers.model.gguf_header import TensorInfo
from expertier.tiers.model.table import ExpertTable
from expertier.units import round_up

HEADER = -1  # extent_header in llama_host/file.h
EXPERTS = -2  # extent_experts in llama_host/file.h
_SPLIT_PREFIX = Keys.Split.LLM_KV_SPLIT_COUNT.split(".")[0] + "."


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [begin, end) of what the loader sees. They come from `offset` on of `file`: a number, HEADER or EXPERTS."""

    begin: int
    end: int
    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class LoaderView:
    """The extents, contiguous from 0, and the merged header; None for a single file, which has a header of its own."""

    extents: tuple[Extent, ...]
    header: bytes | None


def loader_view(table: ExpertTable) -> LoaderView:
    """Return the view of a model's files.

    Raises:
        ModelError: a file changed since the table was made, or a shard has a tensor whose size is not known.
    """
    if len(table.files) == 1:
        return LoaderView(_view_of_one(table), None)
    shards = read_file_shards(table.path, table.type_sizes)
    if [file.identity for file in table.files] != [
        FileIdentity.of(shard.header.file_stat) for shard in shards
    ]:
        raise ModelError(
            f"{table.path} or another of its shards changed after the table was read; open it again"
        )
    return _view_of_shards(table, shards)


def _view_of_one(table: ExpertTable) -> tuple[Extent, ...]:
    extents = []
    at = 0
    for begin, end in table.expert_ranges:
        if begin > at:
            extents.append(Extent(at, begin, 0, at))
        extents.append(Extent(begin, end, EXPERTS, 0))
        at = end
    if table.file_bytes > at:
        extents.append(Extent(at, table.file_bytes, 0, at))
    return tuple(extents)


def _view_of_shards(table: ExpertTable, shards: tuple[FileShard, ...]) -> LoaderView:
    experts = {matrix.name for layer in table.layers for matrix in layer.matrices}
    alignment = shards[0].header.alignment
    entries = []
    extents = []
    data_bytes = 0
    for number, shard in enumerate(shards):
        for tensor in shard.header.tensors:
            n_bytes = tensor.n_bytes
            if n_bytes is None:  # without it, the place of the next tensor in the merged data is unknown
                raise UnsupportedLayoutError(
                    f"{shard.path}: {tensor.name} of shape {list(tensor.dims)} has the ggml type {tensor.ggml_type}, "
                    f"none that {table.type_sizes.advice}; or join the shards into one file with llama-gguf-split "
                    "--merge"
                )
            entries.append(_entry(tensor, data_bytes))
            file = EXPERTS if tensor.name in experts else number
            extents.append(Extent(data_bytes, data_bytes + n_bytes, file, 0 if file < 0 else tensor.offset))
            padded = data_bytes + round_up(n_bytes, alignment)
            if padded > data_bytes + n_bytes:  # padding, which the loader does not read
                extents.append(Extent(data_bytes + n_bytes, padded, EXPERTS, 0))
            data_bytes = padded
    header = _merged_header(shards[0], entries, alignment)
    moved = (
        Extent(extent.begin + len(header), extent.end + len(header), extent.file, extent.offset)
        for extent in extents
    )
    return LoaderView((Extent(0, len(header), HEADER, 0), *moved), header)


def _entry(tensor: TensorInfo, offset: int) -> bytes:
    """Return a tensor's entry as GGUF writes it, with the offset of its data among all data."""
    name = tensor.name.encode()
    return struct.pack(
        f"<Q{len(name)}sI{len(tensor.dims)}QIQ",
        len(name),
        name,
        len(tensor.dims),
        *tensor.dims,
        tensor.ggml_type,
        offset,
    )


def _merged_header(first: FileShard, entries: list[bytes], alignment: int) -> bytes:
    spans = [span for key, span in first.header.value_spans.items() if not key.startswith(_SPLIT_PREFIX)]
    with open(first.path, "rb") as file:
        magic = file.read(4)
        values = []
        for begin, end in spans:
            file.seek(begin)
            values.append(file.read(end - begin))
    start = magic + struct.pack("<IQQ", first.header.version, len(entries), len(values))
    header = start + b"".join(values) + b"".join(entries)
    return header.ljust(round_up(len(header), alignment), b"\0")
