"""Variables with anything in them: a configuration or a ConfigError, soon and in little memory."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.tiers.config.config import NOT_YET, VARIABLES, TierConfig
from model_files.fuzz_rules import bounded

# A variable's bytes that are no UTF-8 reach Python as lone surrogates; a variable has at most 128 KiB.
anything = st.text(max_size=40) | st.binary(max_size=40).map(os.fsdecode)
numbers = st.from_regex(r"[0-9]{1,30}(\.[0-9]{0,30})?", fullmatch=True)
odd_numbers = st.from_regex(
    r"[-+ ]?[0-9_]{0,9}[.,eE]?[-+]?[0-9]{0,9}( ?(MiB|%|nan|inf|auto))?", fullmatch=True
)
texts = (
    anything
    | numbers
    | odd_numbers
    | st.sampled_from(["auto", "lru", "lfu-decay", "AUTO", " auto\n", "0", "1"])
)
known = st.sampled_from([*(variable.name for variable in VARIABLES), *NOT_YET])
names = (
    st.sampled_from([variable.name for variable in VARIABLES])
    | known
    | anything.map(lambda text: "MOE_" + text)
)
LONG = 128 << 10


def read(environ: dict[str, str], overrides: dict[str, str | None] | None = None) -> TierConfig | ConfigError:
    with bounded(sum(len(name) + len(text) for name, text in environ.items())):
        try:
            return TierConfig.from_env(overrides, environ=environ)
        except ConfigError as error:
            return error


@given(environ=st.dictionaries(names, texts, max_size=4))
@example(environ={"MOE_" + "\udcff" * 10: "1"})
def test_any_environment(environ: dict[str, str]) -> None:
    found = read(environ)
    if isinstance(found, TierConfig):
        assert found.expert_cache_bytes == "auto" or 0 < found.expert_cache_bytes <= 1 << 60
        assert found.host_pool_bytes == "auto" or 0 <= found.host_pool_bytes <= 1 << 60
        assert 0 < found.host_pool_percent <= 100


@given(name=known, text=texts)
def test_an_option_goes_first(name: str, text: str) -> None:
    found = read({name: "junk"}, {name: text})
    alone = read({}, {name: text})
    assert type(found) is type(alone)
    assert str(found) == str(alone)


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES])
@pytest.mark.parametrize(
    "text",
    [
        "9" * LONG,
        "0." + "0" * LONG + "1",
        "1." + "9" * LONG,
        "." * LONG,
        "auto" * (LONG // 4),
        " " * LONG,
        "0" * LONG,
    ],
    ids=lambda text: text[:3],
)
def test_long_texts(name: str, text: str) -> None:
    assert isinstance(read({name: text}), TierConfig | ConfigError)


@pytest.mark.parametrize("letters", ["A", "MOE_HOST_POOL_", "".join(map(chr, range(0x400, 0x800)))], ids=len)
def test_long_names(letters: str) -> None:
    assert isinstance(read({"MOE_" + letters * (LONG // len(letters)): "1"}), ConfigError)
