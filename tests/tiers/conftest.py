"""The interpreter as tests of the tiers need it: it switches threads often, or SIGINT raises `KeyboardInterrupt`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from interruptions.interrupted_tiers import default_handler


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Have the interpreter change to another thread after 10 us, so that threads meet at more places."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have SIGINT raise `KeyboardInterrupt`, also where the shell that started the tests had it ignored."""
    with default_handler():
        yield
