"""Saved and loaded states of the drop-in, resets, caches, and arguments that reach the engine."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

from engine_runs.drop_in.models import TEXT, ours, stock
from engine_runs.tiered_runs import SMALL, prompt_tokens, write_small_model
from model_files.shard_files import split_model


def states(folder: Path) -> dict[str, bool]:
    """Saved and loaded states, resets, caches and prefixes; arguments that reach the engine."""
    path = write_small_model(folder, "Q4_K+Q6_K")
    prompt = prompt_tokens(60)

    def story(llama: Any) -> list[str]:
        told = []
        llama.eval(prompt)
        state = llama.save_state()
        told.append(str(list(_next(llama, 8))))
        llama.load_state(state)
        told.append(str(list(_next(llama, 8))))
        llama.reset()
        told.append(llama.create_completion(TEXT, max_tokens=12, temperature=0)["choices"][0]["text"])
        told.append(
            llama.create_completion(TEXT + " and", max_tokens=12, temperature=0)["choices"][0]["text"]
        )
        llama.set_cache(llama_cpp.LlamaRAMCache())
        for _ in range(2):
            told.append(llama.create_completion(TEXT, max_tokens=12, temperature=0)["choices"][0]["text"])
        return told

    def told_by(open_model: Any, **arguments: Any) -> list[str]:
        llama = open_model(**arguments)
        told = story(llama)
        llama.close()
        return told

    overrides = {"kv_overrides": {"qwen3moe.expert_used_count": 2, "general.name": "other"}}
    expected = told_by(lambda **a: stock(path, **a))
    expected_flash = told_by(lambda **a: stock(path, **a), flash_attn=True, type_k=8)
    expected_two = told_by(lambda **a: stock(path, **a), **overrides)
    assert expected_two != expected
    half = SMALL.experts // 2
    vectors = []
    for open_model in (lambda: stock(path, embedding=True), lambda: ours(path, half, embedding=True)):
        llama = open_model()
        vectors.append(llama.create_embedding([TEXT, "another text"])["data"])
        llama.close()
    shards = split_model(path, folder, 3)[1]
    draft = (
        llama_cpp.llama_speculative.LlamaPromptLookupDecoding()
        if hasattr(llama_cpp, "llama_speculative")
        else None
    )
    return {
        "state": expected[0] == expected[1],
        "as stock": told_by(lambda **a: ours(path, half, **a)) == expected,
        "flash attention": told_by(lambda **a: ours(path, half, **a), flash_attn=True, type_k=8)
        == expected_flash,
        "overrides": told_by(lambda **a: ours(path, half, **a), **overrides) == expected_two,
        "pickled": told_by(lambda **a: pickle.loads(pickle.dumps(ours(path, half, **a)))) == expected,
        "embeddings": vectors[0] == vectors[1],
        "shards": told_by(lambda **a: ours(shards, half, **a)) == expected,
        "ignored arguments": told_by(
            lambda **a: ours(path, half, **a),
            n_gpu_layers=-1,
            main_gpu=0,
            tensor_split=[1.0],
            use_mlock=True,
            use_mmap=True,
            split_mode=llama_cpp.LLAMA_SPLIT_MODE_LAYER,
            draft_model=draft,
        )
        == expected,
    }


def _next(llama: Any, n_tokens: int) -> Iterator[int]:
    for token, _ in zip(llama.generate([5], temp=0.0, reset=False), range(n_tokens), strict=False):
        yield token
