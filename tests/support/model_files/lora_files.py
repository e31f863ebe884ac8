"""Random LoRA adapters, as GGUF files that llama.cpp loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

RANK = 4


def write_lora(path: Path, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write an adapter for the tensors named in `shapes`: (rows out, rows in), experts first where there are any."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 2.0 * RANK)
    for name, (*experts, n_out, n_in) in shapes.items():
        a = random.standard_normal((*experts, RANK, n_in), np.float32)
        b = random.standard_normal((*experts, n_out, RANK), np.float32)
        writer.add_tensor(f"{name}.lora_a", a * n_in**-0.5)
        writer.add_tensor(f"{name}.lora_b", b * RANK**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
