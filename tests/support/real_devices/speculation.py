"""Greedy speculative decoding: a draft model proposes tokens, the main model keeps those that it would have chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.llama_cpp import LlamaContext

PROPOSED = 4
"""Tokens of the draft a round; the main model runs one more, in one batch."""


@dataclass
class Speculation:
    """What came out: the tokens, the main model's logits for every token it ran, and how the draft fared."""

    tokens: list[int] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0


def speculate(main: LlamaContext, draft: LlamaContext, prompt: Sequence[int], n_tokens: int) -> Speculation:
    """Continue `prompt` by `n_tokens` tokens as the main model alone would, with the draft's proposals."""
    done = Speculation()
    main.decode(prompt, 0)
    draft.decode(prompt, 0)
    done.logits.append(main.logits())
    kept, next_token = len(prompt), int(done.logits[-1].argmax())  # `kept`: what both caches hold
    done.tokens.append(next_token)
    behind: list[int] = []  # tokens before the next one that the draft has not seen
    while len(done.tokens) < n_tokens:
        proposals = _propose(draft, [*behind, next_token], kept - len(behind))
        main.decode([next_token, *proposals], kept, all_logits=True)
        rows = [main.logits(i) for i in range(len(proposals) + 1)]
        done.logits += rows
        chosen = [int(row.argmax()) for row in rows]
        right = next((i for i, token in enumerate(proposals) if token != chosen[i]), len(proposals))
        done.proposed += len(proposals)
        done.accepted += right
        done.tokens += chosen[: right + 1]
        seen_by_draft = kept + len(proposals)  # the last proposal was never run by it
        kept += right + 1
        main.forget(0, kept)
        draft.forget(0, min(kept, seen_by_draft))
        behind = [proposals[-1]] if kept > seen_by_draft else []
        next_token = chosen[right]
    del done.tokens[n_tokens:]
    return done


def _propose(draft: LlamaContext, tokens: Sequence[int], position: int) -> list[int]:
    """Return the draft's next tokens after `tokens`, which begin at `position`."""
    proposals: list[int] = []
    for _ in range(PROPOSED):
        draft.decode(tokens, position)
        position += len(tokens)
        tokens = [int(draft.logits().argmax())]
        proposals += tokens
    return proposals
