"""The load of our model is served by the tiers, on its thread and once; every other load stays stock."""

from __future__ import annotations

import threading

import pytest

from engine_runs.drop_in.stand_ins import Params
from expertier.engine_adapter.hosts.llama_cpp_python import loading
from expertier.errors import EngineMismatchError
from limits.waits import joined


def test_a_load_is_served_once_and_on_its_thread(package):
    loading.wrap(package, lambda: None)
    loading.wrap(package, lambda: 1 / 0)
    load = package.llama_cpp.llama_model_load_from_file
    assert package.llama_model_load_from_file is load
    seen = []
    with loading.served_by(lambda params: seen.append(params) or 5):
        other = threading.Thread(target=load, args=(b"other", Params()), daemon=True)
        other.start()
        joined(other)
        assert load(b"ours", mine := Params()) == 5
        assert load(b"another", Params()) == 77
    assert seen == [mine]
    assert [path for path, _ in package.llama_cpp.loaded] == [b"other", b"another"]


def test_other_loads_are_kept_off_our_devices(package):
    devices = []
    loading.wrap(package, lambda: devices[0] if devices else None)
    load = package.llama_cpp.llama_model_load_from_file
    load(b"before", Params())
    devices.append(4096)
    mine = Params(n_gpu_layers=3)
    load(b"after", mine)
    load(b"chosen", Params(devices=64))
    assert [params.devices for _, params in package.llama_cpp.loaded] == [None, 4096, 64]
    assert package.llama_cpp.loaded[1][1].n_gpu_layers == 3
    assert mine.devices is None


def test_a_block_that_loads_nothing_is_refused():
    says = "did not load its model with llama_model_load_from_file"
    with pytest.raises(EngineMismatchError, match=says), loading.served_by(lambda _: 5):
        pass
    with pytest.raises(KeyError), loading.served_by(lambda _: 5):
        raise KeyError


def test_parameters_have_to_be_a_structure():
    with pytest.raises(EngineMismatchError, match="dict in place of llama_model_params"):
        loading.as_parameters({})
