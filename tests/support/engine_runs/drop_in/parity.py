"""The drop-in says what stock says: logits and texts of one model and of two in one process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp

from engine_runs.drop_in.models import COMMON, TEXT, all_logits, ours, stock
from engine_runs.tiered_runs import SMALL, prompt_tokens, write_small_model
from expertier.engine_adapter.models.synth import write_model
from limits.waits import PATIENCE_S
from model_files.architecture_models import slot_counts

SLOTS = slot_counts(SMALL)


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
    """Compare logits and texts by the number of slots, before and after the proxy is registered."""
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
