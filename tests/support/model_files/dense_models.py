"""A random model without experts, as a draft model may be: a MoE of one expert, whose only expert becomes its FFN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import write_model

_DROPPED = ("GGUF.", "general.architecture", "general.alignment")


def write_dense_llama(path: Path, shape: ModelShape) -> Path:
    """Write a dense llama of the widths and the vocabulary of `shape`."""
    one = replace(shape, architecture="llama", experts=1, top_k=1, gate_up_type="F32", down_type="F32")
    reader = gguf.GGUFReader(write_model(path.with_suffix(".moe"), one))
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(_DROPPED) and ".expert" not in field.name:
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        if tensor.name.endswith("ffn_gate_inp.weight"):
            continue
        data = tensor.data[0] if "_exps." in tensor.name else tensor.data
        writer.add_tensor(tensor.name.replace("_exps.", "."), data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
