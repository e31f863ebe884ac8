"""A batch whose experts could not be read raises, and leaves nothing in the cache; other errors are those of stock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from expertier.engine_adapter.hosts.llama_cpp_python.batches import WatchedBatches
from expertier.errors import DecodeError, SourceError


class ToyLlama:
    """Stands in for llama.h: a cache that holds positions of sequences, and batches that end as they are told."""

    def __init__(self, *, recurrent: bool = False) -> None:
        self.recurrent = recurrent
        self.status = 0
        self.cache: dict[int, int] = {}
        self.called: list[str] = []

    def llama_get_memory(self, _context: int) -> int:
        return 9

    def llama_decode(self, _context: int, batch: Any) -> int:
        self.called.append("decode")
        if self.status in (0, -3):
            for i in range(batch.n_tokens):
                self.cache[batch.seq_id[i][0]] = batch.pos[i] + 1
        return self.status

    def llama_synchronize(self, _context: int) -> None:
        self.called.append("synchronize")

    def llama_memory_seq_pos_max(self, _memory: int, sequence: int) -> int:
        return self.cache.get(sequence, 0) - 1

    def llama_memory_seq_rm(self, _memory: int, sequence: int, begin: int, end: int) -> bool:
        assert end == -1
        if self.recurrent and begin > 0:
            return False
        self.cache[sequence] = max(begin, 0)
        return True


class ToyBinding:
    """Stands in for the tiers' binding: what it says after a batch."""

    def __init__(self) -> None:
        self.said: list[tuple[str, BaseException | None]] = []
        self.tiers = SimpleNamespace(require_no_leases_here=lambda _what: None)

    def take_error(self) -> tuple[str, BaseException | None]:
        return self.said.pop(0) if self.said else ("", None)

    def says(self, message: str, cause: BaseException | None = None) -> None:
        self.said = [("", None), (message, cause)]


def batch(begin: int, n: int = 4, sequence: int = 0) -> Any:
    return SimpleNamespace(
        batch=SimpleNamespace(
            n_tokens=n, pos=list(range(begin, begin + n)), n_seq_id=[1] * n, seq_id=[[sequence]] * n
        )
    )


def test_a_batch_that_ends_well():
    llama = ToyLlama()
    WatchedBatches(llama, 1, ToyBinding()).decode(batch(0))
    assert llama.cache == {0: 4}
    assert llama.called == ["decode", "synchronize"]


@pytest.mark.parametrize("status", [0, -3])
def test_a_batch_without_its_experts_raises_and_leaves_nothing(status):
    llama, binding = ToyLlama(), ToyBinding()
    watched = WatchedBatches(llama, 1, binding)
    watched.decode(batch(0))
    llama.status = status
    cause = SourceError("model.gguf: an error of the disk") if status else None
    binding.says("layer 2: expert bytes could not be read", cause)
    with pytest.raises(DecodeError, match="layer 2: expert bytes") as caught:
        watched.decode(batch(4))
    assert caught.value.__cause__ is cause
    assert llama.cache == {0: 4}
    llama.status = 0
    watched.decode(batch(4))
    assert llama.cache == {0: 8}


@pytest.mark.parametrize(("status", "left"), [(1, 4), (-1, 4), (2, 4), (-3, 4)])
def test_the_engines_own_statuses_are_those_of_stock(status, left):
    llama = ToyLlama()
    watched = WatchedBatches(llama, 1, ToyBinding())
    watched.decode(batch(0))
    llama.status = status
    with pytest.raises(RuntimeError, match=f"llama_decode returned {status}"):
        watched.decode(batch(4))
    assert llama.cache == {0: left}


def test_a_sequence_that_was_lost_starts_anew():
    llama, binding = ToyLlama(recurrent=True), ToyBinding()
    watched = WatchedBatches(llama, 1, binding)
    watched.decode(batch(0))
    watched.decode(batch(0, sequence=1))
    llama.status = -3
    binding.says("layer 0: expert bytes could not be read", SourceError("x"))
    with pytest.raises(DecodeError):
        watched.decode(batch(4))
    assert llama.cache == {0: 0, 1: 4}
    llama.status = 0
    with pytest.raises(DecodeError, match=r"from position 4 .* call reset\(\)"):
        watched.decode(batch(4))
    watched.decode(batch(4, sequence=1))
    llama.cache[0] = 4  # a state was loaded
    watched.decode(batch(4))
    assert llama.cache == {0: 8, 1: 8}


def test_a_sequence_that_was_lost_begins_at_0():
    llama, binding = ToyLlama(recurrent=True), ToyBinding()
    watched = WatchedBatches(llama, 1, binding)
    watched.decode(batch(0))
    llama.status = -3
    binding.says("layer 0", SourceError("x"))
    with pytest.raises(DecodeError):
        watched.decode(batch(4))
    llama.status = 0
    watched.decode(batch(0))
    watched.decode(batch(4))
    assert llama.cache == {0: 8}
