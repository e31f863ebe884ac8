"""What the drop-in frees when a model is closed or deleted, and a script that does neither."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import llama_cpp

from engine_runs.drop_in.models import TEXT, ours
from engine_runs.tiered_runs import SMALL, prompt_tokens, write_small_model
from expertier.engine_adapter.llama_cpp import layer_tiers
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.errors import LeaseError


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


def left_open(folder: Path, verbose: bool = False) -> dict[str, Any]:
    """A script that ends without closing its model."""
    global left
    left = ours(write_small_model(folder, "Q4_K+Q6_K"), 2, verbose=verbose)
    return {"text": left.create_completion(TEXT, max_tokens=8, temperature=0)["choices"][0]["text"]}
