"""The split mode as the user gives it: what does not parse, and hosts that cannot have it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from expertier.engine_adapter.open import open_tiers
from expertier.errors import ConfigError
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.table import ExpertTable


def test_the_variable_and_the_option_are_read():
    assert TierConfig.from_env(environ={}).split_mode is SplitMode.LAYER
    assert TierConfig.from_env(environ={"MOE_SPLIT_MODE": "tensor"}).split_mode is SplitMode.TENSOR
    over = {"MOE_SPLIT_MODE": "layer"}
    assert TierConfig.from_env(over, environ={"MOE_SPLIT_MODE": "tensor"}).split_mode is SplitMode.LAYER


@pytest.mark.parametrize("text", ["row", "none", "", "Tensor"])
def test_other_modes_are_refused_with_the_ones_that_there_are(text):
    with pytest.raises(ConfigError, match=r"MOE_SPLIT_MODE=.*give `layer` or `tensor`"):
        TierConfig.from_env(environ={"MOE_SPLIT_MODE": text})


def test_hosts_that_load_by_themselves_refuse_the_tensor_split():
    table = ExpertTable((), "none", ())
    with pytest.raises(
        ConfigError, match=r"MOE_SPLIT_MODE=tensor was asked for here.*use MOE_SPLIT_MODE=layer"
    ):
        open_tiers(SimpleNamespace(proxy=ctypes.CDLL(None)), table, TierConfig(split_mode=SplitMode.TENSOR))
