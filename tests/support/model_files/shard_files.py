"""Splits a small GGUF into shards, as llama.cpp's gguf-split does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def split_model(path: Path, folder: Path, n_shards: int, stem: str = "model") -> list[Path]:
    """Write the tensors of `path` into `n_shards` files in `folder`; the first one also has all keys."""
    reader = gguf.GGUFReader(path)
    groups = np.array_split(np.arange(len(reader.tensors)), n_shards)
    paths = []
    for number, group in enumerate(groups):
        target = folder / f"{stem}-{number + 1:05d}-of-{n_shards:05d}.gguf"
        writer = gguf.GGUFWriter(target, "none")
        writer.kv_data[0].clear()
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF."):
                    items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)
        writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, number)
        writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, n_shards)
        writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(reader.tensors))
        for i in group:
            tensor = reader.tensors[i]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(target)
    return paths
