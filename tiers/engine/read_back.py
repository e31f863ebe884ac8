"""Reads expert tensors as the file has them, for an engine that reads back tensors that lie in the tiers."""

from __future__ import annotations

from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.layer import ExpertLayer


def read_matrix(source: ByteSource, layer: ExpertLayer, matrix: int, offset: int, target: memoryview) -> None:
    """Fill `target` with the bytes of the layer's expert tensor number `matrix` from `offset` on.

    `offset` counts through the matrices of all experts, one after another. An expert's matrix is read as a whole,
    because a source of shards can read nothing smaller. Raises what the source raises, and `IndexError` for bytes
    outside of the tensor.
    """
    entry = layer.matrices[matrix]
    size = entry.expert_bytes
    end = offset + len(target)
    if not 0 <= offset <= end <= layer.n_experts * size:
        raise IndexError(
            f"asked for the bytes {offset} to {end} of {entry.name}, which has {layer.n_experts * size}"
        )
    at = offset
    while at < end:
        expert, within = divmod(at, size)
        n_bytes = min(size - within, end - at)
        piece = target[at - offset : at - offset + n_bytes]
        if n_bytes == size:
            source.read_into(entry.span(expert), piece)
        else:
            matrix_bytes = bytearray(size)
            source.read_into(entry.span(expert), memoryview(matrix_bytes))
            piece[:] = memoryview(matrix_bytes)[within : within + n_bytes]
        at += n_bytes
