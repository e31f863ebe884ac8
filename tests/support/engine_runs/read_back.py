"""What an engine reads of a loaded model's tensors for itself: calls of its own C functions, by their symbols."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.matrix import ExpertMatrix


class EngineModel:
    """The engine's own model, as others in the process use it."""

    def __init__(self, engine: LoadedEngine, address: int) -> None:
        self._engine = engine
        self.address = address

    def save(self, path: Path) -> None:
        """Have the engine save the model."""
        save = self._engine.symbol("llama_model_save_to_file", None, ct.c_void_p, ct.c_char_p)
        save(self.address, str(path).encode())

    def load_adapter(self, path: Path) -> int | None:
        """Have the engine load a LoRA adapter; None where it refuses."""
        load = self._engine.symbol("llama_adapter_lora_init", ct.c_void_p, ct.c_void_p, ct.c_char_p)
        found: int | None = load(self.address, str(path).encode())
        return found

    def tensor(self, name: str) -> int:
        """The address of one of its tensors."""
        find = self._engine.symbol("_ZNK11llama_model10get_tensorEPKc", ct.c_void_p, ct.c_void_p, ct.c_char_p)
        found: int | None = find(self.address, name.encode())
        assert found, f"the engine has no tensor {name}"
        return found

    def read(self, name: str, offset: int, n_bytes: int, backend: int | None = None) -> bytes:
        """Bytes of a tensor, through ggml; through a backend, which may read them in the background."""
        out = np.full(n_bytes, 0xA5, np.uint8)
        get = self._engine.symbol(
            "ggml_backend_tensor_get_async" if backend else "ggml_backend_tensor_get",
            None,
            *[ct.c_void_p] * (3 if backend else 2),
            ct.c_size_t,
            ct.c_size_t,
        )
        get(*([backend] if backend else []), self.tensor(name), out.ctypes.data, offset, n_bytes)
        return out.tobytes()

    def read_rows(
        self, name: str, offset: int, n_bytes: int, n: int, stride: int, backend: int | None = None
    ) -> bytes:
        """`n` pieces of `n_bytes` bytes of a tensor, `stride` bytes apart; as above."""
        out = np.full((n, n_bytes + 3), 0xA5, np.uint8)
        get = self._engine.symbol(
            "ggml_backend_tensor_get_2d_async" if backend else "ggml_backend_tensor_get_2d",
            None,
            *[ct.c_void_p] * (3 if backend else 2),
            *[ct.c_size_t] * 5,
        )
        places = (offset, n_bytes, n, stride, out.shape[1])
        get(*([backend] if backend else []), self.tensor(name), out.ctypes.data, *places)
        assert (out[:, n_bytes:] == 0xA5).all(), "more was written than was asked for"
        return out[:, :n_bytes].tobytes()


@contextmanager
def engine_model(engine: LoadedEngine, model: LlamaModel) -> Iterator[EngineModel]:
    """The engine's own model inside of `model`, which is freed at the end."""
    address = model.hand_over()
    try:
        yield EngineModel(engine, address)
    finally:
        engine.symbol("llama_model_free", None, ct.c_void_p)(address)


def assert_read_in_pieces(
    engine_model: EngineModel,
    file: bytes,
    layer: ExpertLayer,
    matrix: ExpertMatrix,
    *,
    backend: int | None = None,
) -> None:
    """Assert that any piece of a matrix of all experts is the file's: whole, across experts, and rows of them."""
    whole = file[matrix.file_offset : matrix.file_offset + layer.n_experts * matrix.expert_bytes]
    assert engine_model.read(matrix.name, 0, len(whole), backend) == whole
    random = np.random.default_rng(3)
    for _ in range(20):
        begin, end = sorted(random.integers(0, len(whole) + 1, 2).tolist())
        if begin < end:
            assert engine_model.read(matrix.name, begin, end - begin, backend) == whole[begin:end]
    row = matrix.expert_bytes // matrix.ne1
    for n, stride, size in (
        (matrix.ne1, row, row // 2),
        (layer.n_experts, matrix.expert_bytes, row),
        (3, 7, 7),
    ):
        begin = 5
        n = min(n, (len(whole) - begin - size) // stride + 1)
        expected = b"".join(whole[begin + i * stride :][:size] for i in range(n))
        assert engine_model.read_rows(matrix.name, begin, size, n, stride, backend) == expected
