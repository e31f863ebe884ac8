"""The architectures that random models can have. Each has a file with its tensors and its keys.

A new architecture is a module with a function for the tensors, a function for the keys, and an `Architecture` of both,
which joins `ARCHITECTURES` here. Names and keys come from the gguf package's tables; the engine's own source,
`src/models/NAME.cpp`, shows what an architecture needs.
"""

from __future__ import annotations

from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.deepseek2 import DEEPSEEK2
from expertier.engine_adapter.models.synth_arch.gemma4 import GEMMA4
from expertier.engine_adapter.models.synth_arch.glm4moe import GLM4MOE
from expertier.engine_adapter.models.synth_arch.gpt_oss import GPT_OSS
from expertier.engine_adapter.models.synth_arch.llama import LLAMA
from expertier.engine_adapter.models.synth_arch.llama4 import LLAMA4
from expertier.engine_adapter.models.synth_arch.nemotron_h_moe import NEMOTRON_H_MOE
from expertier.engine_adapter.models.synth_arch.olmoe import OLMOE
from expertier.engine_adapter.models.synth_arch.qwen3moe import QWEN3MOE
from expertier.engine_adapter.models.synth_arch.qwen4exp import QWEN4EXP
from expertier.engine_adapter.models.synth_arch.tensor import Tensor, WritableTensor

__all__ = ["ARCHITECTURES", "Architecture", "Tensor", "WritableTensor"]

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        QWEN3MOE,
        LLAMA,
        GPT_OSS,
        DEEPSEEK2,
        OLMOE,
        GLM4MOE,
        GEMMA4,
        LLAMA4,
        NEMOTRON_H_MOE,
        QWEN4EXP,
    )
}
"""All architectures, by the name that a file's `general.architecture` has."""
