"""A context over tiers with a number of slots of one's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_runs.tiered_runs import assert_nothing_held, make_tiers
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel, LoadedEngine
from expertier.tiers.manager import TierManager
from expertier.tiers.tier_set import TierSet

OpenTiered = Callable[..., AbstractContextManager[tuple[TierManager, LlamaModel, LlamaContext]]]


@pytest.fixture
def open_tiered(loaded_engine: LoadedEngine, path: Path) -> OpenTiered:
    """Open (tiers, model, context) with a number of slots; at the end nothing may be held.

    Ubatches are of 16 tokens, so that a prompt takes several; `options` are the context's and go before that.
    """

    @contextmanager
    def open_tiered(
        n_slots: int = 4, **options: Any
    ) -> Iterator[tuple[TierManager, LlamaModel, LlamaContext]]:
        with (
            make_tiers(path, n_slots) as tiers,
            LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        ):
            with model.context(**{"n_ctx": 128, "n_ubatch": 16, "n_threads": 1} | options) as context:
                yield tiers, model, context
            assert_nothing_held(tiers)

    return open_tiered
