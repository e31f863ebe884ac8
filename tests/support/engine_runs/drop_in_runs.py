"""What the tests of the drop-in run on the real llama-cpp-python, each in a process of its own.

`python drop_in_runs.py SCENARIO FOLDER OPTIONS`; the last line of the output is a JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens, write_small_model
from expertier.engine_adapter.hosts.llama_cpp_python import Llama
from expertier.engine_adapter.llama_cpp import LoadedEngine, layer_tiers
from expertier.engine_adapter.models.synth import write_model
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.errors import (
    BudgetError,
    BusyError,
    DecodeError,
    EngineMismatchError,
    LeaseError,
    NotMoeError,
    SourceError,
)
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from failures.failing_reads import FailingReads
from limits.waits import PATIENCE_S
from model_files.architecture_models import MODELS, slot_counts
from model_files.gguf_files import write_model as write_raw_model
from model_files.shard_files import split_model

COMMON = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
SLOTS = slot_counts(SMALL)
TEXT = "some words to go on from"


def budget(path: Path, n_slots: int) -> float:
    """Return the MiB that give every layer exactly `n_slots` slots."""
    return sum(demand.bytes_for(n_slots) for demand in ExpertTable.from_gguf(path).layer_demands()) / MIB


def ours(path: Path, n_slots: int, **arguments: Any) -> Any:
    """Open the model through tiers with `n_slots` slots a layer."""
    llama = Llama(str(path), expert_cache_mib=budget(path, n_slots), **{**COMMON, **arguments})
    assert set(llama.tiers.slots) == {n_slots}
    return llama


@contextmanager
def without_repacking() -> Iterator[None]:
    """Have stock models that are opened inside keep their weights as the file has them, as tiers do."""
    real = llama_cpp.llama_cpp.llama_model_default_params

    def defaults() -> Any:
        params = real()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = defaults
    try:
        yield
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = real


def stock(path: Path, **arguments: Any) -> Any:
    """Open the model with the class that ours takes the place of."""
    with without_repacking():
        return llama_cpp.Llama(str(path), **{**COMMON, **arguments})


def last_logits(llama: Any, n_rows: int) -> bytes:
    """The engine's own logits of the last batch."""
    return np.ctypeslib.as_array(llama._ctx.get_logits(), (n_rows, llama.n_vocab())).tobytes()


def all_logits(llama: Any, prompt: list[int], n_tokens: int) -> bytes:
    """Logits of a prompt and of `n_tokens` that follow greedily; of a Llama with `logits_all`."""
    llama.reset()
    llama.eval(prompt)
    low_level = last_logits(llama, len(prompt) % llama.n_batch or llama.n_batch)
    for _ in range(n_tokens):
        llama.eval([int(np.argmax(llama.scores[llama.n_tokens - 1]))])
        low_level += last_logits(llama, 1)
    assert llama.n_tokens == len(prompt) + n_tokens
    return llama.scores[: llama.n_tokens].tobytes() + low_level


def texts(llama: Any) -> dict[str, Any]:
    """What the front doors of a Llama say."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}]
    options = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
    completion = llama.create_completion(TEXT, logprobs=3, **options)
    chat = llama.create_chat_completion(messages, **options)
    stream = llama.create_completion("another text", stream=True, **options)
    return {
        "completion": json.dumps(completion["choices"], default=float),
        "chat": json.dumps(chat["choices"], default=float),
        "stream": "".join(chunk["choices"][0]["text"] for chunk in stream),
    }


def parity(folder: Path, kind: str) -> dict[str, Any]:
    """The same logits and texts, by the number of slots, before and after the proxy is registered."""
    path = write_small_model(folder, kind)
    prompt = prompt_tokens(200)
    arguments = {"logits_all": True, "n_batch": 160, "n_ubatch": 96}
    with_stock = stock(path, **arguments)
    logits, said = all_logits(with_stock, prompt, 96), texts(with_stock)
    with_stock.close()
    if kind == "F32":  # nothing of it is repacked: so it has to be as stock opens it by itself
        plain = llama_cpp.Llama(str(path), **{**COMMON, **arguments})
        assert all_logits(plain, prompt, 96) == logits
    assert len(said["stream"]) > 10
    found = {}
    for name, n_slots in SLOTS.items():
        llama = ours(path, n_slots, **arguments)
        same = {"logits": all_logits(llama, prompt, 96) == logits}
        same |= {key: text == said[key] for key, text in texts(llama).items()}
        llama.tiers.check_valid()
        after = stock(path, n_gpu_layers=-1, **arguments)
        before = llama.binding.counters().graphs
        same["stock_after"] = (
            all_logits(after, prompt, 96) == logits and llama.binding.counters().graphs == before
        )
        after.close()
        described = llama.describe()
        found[name] = {
            **same,
            "expert_bytes_read": described["load"]["expert_bytes_read"],
            "expert_bytes_skipped": described["load"]["expert_bytes_skipped"],
            "hits": described["l1"]["hits"],
            "pass_calls": described["proxy"]["pass_calls"],
        }
        llama.close()
    return found


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


def two_models(folder: Path) -> dict[str, bool]:
    """Two models with tiers at once, used in turn, and each closed while the other goes on."""
    first = write_small_model(folder, "Q4_K+Q6_K")
    second = write_model(folder / "second.gguf", replace(SMALL, layers=2, seed=5, gate_up_type="Q8_0"))
    prompt = prompt_tokens(80)
    expected = []
    for path in (first, second):
        llama = stock(path, logits_all=True)
        expected.append(all_logits(llama, prompt, 16))
        llama.close()
    assert expected[0] != expected[1]
    one, two = ours(first, 2, logits_all=True), ours(second, 5, logits_all=True)
    found = {
        "first": all_logits(one, prompt, 16) == expected[0],
        "second": all_logits(two, prompt, 16) == expected[1],
    }
    one.eval(prompt[:4])
    two.eval(prompt[:4])
    one.close()
    found["second alone"] = all_logits(two, prompt, 16) == expected[1]
    one = ours(first, 8, logits_all=True)
    two.close()
    found["first again"] = all_logits(one, prompt, 16) == expected[0]
    two = ours(second, 5, logits_all=True)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(all_logits, llama, prompt, 16) for llama in (one, two)]
        found["at the same time"] = [each.result(PATIENCE_S) for each in running] == expected
    one.close()
    two.close()
    return found


def failed_reads(folder: Path, architecture: str) -> dict[str, bool]:
    """A read of expert bytes that fails raises, whatever was called, and the next call is right."""
    path = write_model(folder / "model.gguf", MODELS[architecture])
    prompt = prompt_tokens(40)
    llama = stock(path, logits_all=True)
    expected = all_logits(llama, prompt, 8)
    text = llama.create_completion(TEXT, max_tokens=12, temperature=0)["choices"][0]["text"]
    recurrent = bool(llama._is_recurrent or llama._is_hybrid)
    llama.close()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        reads = FailingReads(patch)
        llama = ours(path, 2, logits_all=True)
        for nth in (1, 7, 40):
            llama.reset()
            reads.fail_call(nth)
            found[f"prompt {nth}"] = _raises(path, lambda: llama.eval(prompt)) and llama.n_tokens == 0
            found[f"prompt {nth} again"] = all_logits(llama, prompt, 8) == expected

        llama.reset()
        llama.eval(prompt)
        before = last_logits(llama, len(prompt))
        reads.fail_thread()
        found["token"] = _raises(path, lambda: llama.eval([300]))
        found["token, no logits of it"] = llama._requires_eval
        reads.heal()
        if recurrent:
            found["lost"] = _raises(None, lambda: llama.eval([300]))
        else:
            found["token again"] = next(llama.generate(prompt, temp=0.0)) == int(
                np.argmax(np.frombuffer(before, np.float32).reshape(len(prompt), -1)[-1])
            )
        found["anew"] = all_logits(llama, prompt, 8) == expected

        llama.reset()
        reads.fail_call(30)
        found["completion"] = _raises(
            path, lambda: llama.create_completion(TEXT, max_tokens=12, temperature=0)
        )
        if recurrent:
            llama.reset()
        again = llama.create_completion(TEXT, max_tokens=12, temperature=0)
        found["completion again"] = again["choices"][0]["text"] == text
        reads.fail_call(60)
        stream = llama.create_completion("another", max_tokens=40, temperature=0, stream=True)
        found["stream"] = _raises(path, lambda: list(stream))
        llama.reset()
        with llama.tiers.managers[0].acquire(0, [0]):
            try:
                llama.eval(prompt)
                found["leases"] = False
            except BusyError:
                found["leases"] = True
        found["at last"] = all_logits(llama, prompt, 8) == expected
        llama.tiers.check_valid()
        llama.close()
    return found


def _raises(path: Path | None, call: Any) -> bool:
    """Whether the call raises DecodeError: of a read of `path`, or of a sequence that was lost."""
    try:
        call()
    except DecodeError as error:
        if path is None:
            return "reset()" in str(error)
        return str(path) in str(error) and isinstance(error.__cause__, SourceError)
    return False


def interrupted(folder: Path) -> dict[str, bool]:
    """A Ctrl-C during a fill is raised after the batch, and what comes next is right."""
    path = write_small_model(folder, "Q4_K+Q6_K")
    prompt = prompt_tokens(40)
    llama = stock(path, logits_all=True)
    expected = all_logits(llama, prompt, 8)
    llama.close()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        reads = FailingReads(patch)
        llama = ours(path, 2, logits_all=True)
        llama.eval(prompt)
        token = int(np.argmax(llama.scores[len(prompt) - 1]))

        def interrupt() -> None:
            reads.before_each = None
            os.kill(os.getpid(), signal.SIGINT)

        reads.before_each = interrupt
        try:
            llama.eval([300, 301, 302])
            found["raised"] = False
        except KeyboardInterrupt:
            found["raised"] = True
        found["not evaluated"] = llama.n_tokens == len(prompt)
        found["next"] = next(llama.generate(prompt, temp=0.0)) == token
        found["anew"] = all_logits(llama, prompt, 8) == expected
        llama.close()
    return found


def freed(folder: Path) -> dict[str, bool]:
    """Closing frees device memory and the engine's; so do failed constructors, and `del`."""
    path = write_small_model(folder, "Q4_K+Q6_K")
    devices: list[Any] = []

    def keep_device(proxy: Any, name: str) -> Any:
        devices.append(device_of(proxy, name))
        return devices[-1]

    layer_tiers.device_of = keep_device
    found = {}
    llama = ours(path, 4, host_pool_mib=1)
    llama.create_completion(TEXT, max_tokens=4)
    llama.close()
    llama.close()
    devices.pop().close()  # raises while anything is allocated
    found["stats after the end"] = llama.tiers.stats().l1.hits > 0
    try:
        llama.tiers.managers[0].acquire(0, [1])
        found["closed"] = False
    except LeaseError:
        found["closed"] = True

    llama = ours(path, 4)
    gone = weakref.ref(llama)
    llama.eval(prompt_tokens(8))
    del llama
    gc.collect()
    devices.pop().close()
    found["deleted"] = gone() is None

    try:
        ours(path, 4, n_ctx=512, type_k=llama_cpp.GGML_TYPE_F16, type_v=7, flash_attn=False)
        found["no context"] = False
    except ValueError:
        found["no context"] = True
    gc.collect()
    devices.pop().close()

    before = _resident()
    for _ in range(12):
        llama = ours(path, SMALL.experts)
        llama.eval(prompt_tokens(16))
        llama.close()
        del llama
        gc.collect()
        devices.pop().close()
    found["memory"] = _resident() - before < 2 * SMALL.expert_bytes_total
    return found


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def errors(folder: Path) -> dict[str, bool]:
    """What is refused with the real package is refused in our own words."""
    path = write_small_model(folder, "Q4_K+Q6_K")

    def says(kind: type[Exception], words: str, **arguments: Any) -> bool:
        try:
            Llama(**{"model_path": str(path), **COMMON, **arguments}).close()
        except kind as error:
            return words in str(error)
        return False

    dense = folder / "dense.gguf"
    with suppress(NotMoeError):
        write_raw_model(dense, [None, None])
    found = {
        "budget": says(BudgetError, "at least", expert_cache_mib=0.01),
        "dense": says(NotMoeError, "dense", model_path=str(dense)),
    }
    unusable = write_raw_model(folder / "unusable.gguf", architecture="qwen3moe").path
    found["the engine's refusal"] = says(Exception, "could not load", model_path=str(unusable))
    params = llama_cpp.llama_cpp.llama_model_params

    class Longer(params):  # type: ignore[misc, valid-type]
        _fields_ = [("more", llama_cpp.ctypes.c_int64)]  # noqa: RUF012

    real = llama_cpp.llama_cpp.llama_model_default_params
    llama_cpp.llama_cpp.llama_model_default_params = lambda: Longer.from_buffer_copy(
        bytes(real()) + b"\0" * 8
    )
    found["another layout"] = says(EngineMismatchError, "more: not recorded")
    llama_cpp.llama_cpp.llama_model_default_params = real
    try:
        LoadedEngine.load((folder / "libother.so",), folder / "proxy.so", folder / "host.so")
        found["another engine"] = False
    except EngineMismatchError as error:
        found["another engine"] = "already runs the engine" in str(error)
    llama = ours(path, 2)
    found["fine afterwards"] = bool(llama.create_completion(TEXT, max_tokens=4)["choices"])
    llama.close()
    return found


def left_open(folder: Path, verbose: bool = False) -> dict[str, Any]:
    """A script that ends without closing its model."""
    global left
    left = ours(write_small_model(folder, "Q4_K+Q6_K"), 2, verbose=verbose)
    return {"text": left.create_completion(TEXT, max_tokens=8, temperature=0)["choices"][0]["text"]}


if __name__ == "__main__":
    scenario, folder, options = sys.argv[1:]
    print(json.dumps(globals()[scenario](Path(folder), **json.loads(options))))
