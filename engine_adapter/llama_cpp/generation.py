"""Runs a prompt and then generates token by token, and measures the time of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.llama_cpp import LlamaContext
from expertier.planner.traces.trace import Phase


@dataclass
class Generation:
    """The generated tokens, and how long they took. `logits` is empty unless logits were asked for."""

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode steps a second."""
        return self.decode_steps / self.decode_s if self.decode_s else 0.0


def generate(
    context: LlamaContext,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    keep_logits: bool = False,
    on_token: Callable[[int], bool] | None = None,
    after_batch: Callable[[Phase, int], None] | None = None,
) -> Generation:
    """Run `prompt`, then up to `n_tokens` decode steps, each on the token sampled from the step before.

    `on_token` gets each token and ends the generation by returning False. With `keep_logits`, `logits` holds one
    row for each prompt token and one for each decode step. `after_batch` is told what a batch was for and how many
    tokens it had, outside the measured times.

    Raises:
        DecodeError: the engine returned an error status.
    """
    done = Generation(prompt_tokens=len(prompt))
    for begin in range(0, len(prompt), context.n_batch):
        batch = prompt[begin : begin + context.n_batch]
        start = time.perf_counter()
        context.decode(batch, begin, all_logits=keep_logits)
        done.prefill_s += time.perf_counter() - start
        if after_batch is not None:
            after_batch(Phase.PREFILL, len(batch))
        if keep_logits:
            done.logits += [context.logits(i) for i in range(len(batch))]
    for position in range(len(prompt), len(prompt) + n_tokens):
        token = context.sample()
        done.tokens.append(token)
        if on_token is not None and not on_token(token):
            break
        start = time.perf_counter()
        context.decode([token], position)
        done.decode_s += time.perf_counter() - start
        done.decode_steps += 1
        if after_batch is not None:
            after_batch(Phase.DECODE, 1)
        if keep_logits:
            done.logits.append(context.logits())
    return done
