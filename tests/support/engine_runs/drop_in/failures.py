"""Batches of the drop-in that end early: failed reads of experts, and Ctrl-C."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_runs.drop_in.models import TEXT, all_logits, last_logits, ours, stock
from engine_runs.tiered_runs import prompt_tokens, write_small_model
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import BusyError, DecodeError, SourceError
from failures.failing_reads import FailingReads
from model_files.architecture_models import MODELS


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
