"""The drop-in for llama-cpp-python: over a stand-in for the package here, over the real one in the deep tests.

The real package is compiled once and kept in the cache folder. Each deep test runs `drop_in_runs` of tests/support in a
process of its own, as one process can have one engine.
"""

from __future__ import annotations

import ctypes as ct
import gc
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine_runs.tiered_runs import make_tiers, write_small_model
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.pins import LLAMA_CPP_PYTHON
from expertier.engine_adapter.build.plugin import require_pinned
from expertier.engine_adapter.hosts.llama_cpp_python import bindings, loading
from expertier.engine_adapter.hosts.llama_cpp_python.batches import WatchedBatches
from expertier.engine_adapter.hosts.llama_cpp_python.in_use import libraries_in_use
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.opening import close_abandoned
from expertier.errors import (
    BudgetError,
    ConfigError,
    DecodeError,
    EngineError,
    EngineMismatchError,
    EngineMissingError,
    LeaseError,
    NotGgufError,
    NotMoeError,
    SourceError,
)
from expertier.tiers.tier_set import TierSet
from interruptions.interrupt_at import at_every_instruction, n_instructions
from limits.waits import joined
from model_files.gguf_files import write_model as write_raw_model

HERE = "expertier.engine_adapter.hosts.llama_cpp_python"


class Params(ct.Structure):
    """Stands in for llama_model_params."""

    _fields_: ClassVar = [
        ("devices", ct.c_void_p),
        ("n_gpu_layers", ct.c_int32),
        ("use_extra_bufts", ct.c_bool),
    ]


def make_llama_h() -> types.ModuleType:
    """Stands in for the module that binds llama.h: everything is there, and nothing does anything."""
    module: Any = types.ModuleType("llama_cpp.llama_cpp")
    for name in bindings._NEEDED:
        setattr(module, name, lambda *_: None)
    module.loaded = []
    module.llama_model_load_from_file = lambda path, params: module.loaded.append((path, params)) or 77
    module.llama_model_default_params = lambda: Params(n_gpu_layers=-1, use_extra_bufts=True)
    module._lib = ct.CDLL("libc.so.6")
    return module


class StockLlama:
    """Stands in for llama_cpp.Llama: loads as it does, and remembers what it was given."""

    loads = True

    def __init__(self, model_path: str, **arguments: Any) -> None:
        self._stack = SimpleNamespace(close=lambda: None)
        self.model_path = model_path
        self.arguments = arguments
        if self.loads:
            package: Any = sys.modules["llama_cpp"]
            package.llama_cpp.llama_model_load_from_file(model_path.encode(), Params())
        self._ctx = SimpleNamespace(ctx=1)
        self._requires_eval = False

    def close(self) -> None:
        self._stack.close()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"model_path": self.model_path, **self.arguments}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package llama_cpp of the pinned version, to be imported in place of a real one."""
    module: Any = types.ModuleType("llama_cpp")
    module.__version__ = LLAMA_CPP_PYTHON.version
    module.__file__ = "/somewhere/llama_cpp/__init__.py"
    module.llama_cpp = make_llama_h()
    module.Llama = type("Llama", (StockLlama,), {})
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    forget_llama(monkeypatch)
    return module


def forget_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module with our class be imported anew, and be forgotten after the test."""
    monkeypatch.delitem(sys.modules, f"{HERE}.llama", raising=False)
    monkeypatch.delattr(importlib.import_module(HERE), "llama", raising=False)
    monkeypatch.setitem(
        sys.modules, f"{HERE}.llama", None
    )  # so that what is imported goes when this is undone
    monkeypatch.delitem(sys.modules, f"{HERE}.llama")


# ---- the package


def test_it_is_not_installed(monkeypatch):
    forget_llama(monkeypatch)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(EngineMissingError, match=r"not installed: pip install 'llama-cpp-python==0\.3\.36'"):
        importlib.import_module(HERE).Llama  # noqa: B018


def test_our_package_has_nothing_else():
    with pytest.raises(AttributeError, match="Lama"):
        importlib.import_module(HERE).Lama  # noqa: B018


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), "lacks its dependency jinja2"),
        (RuntimeError("Failed to load shared library"), "cannot be imported: Failed to load"),
        (FileNotFoundError("Shared library with base name 'llama' not found"), "cannot be imported: Shared"),
    ],
)
def test_it_does_not_import(monkeypatch, error, says):
    def fail(_name):
        raise error

    monkeypatch.setattr(LoadedEngine, "_loaded", None)
    monkeypatch.setattr(bindings.importlib, "import_module", fail)
    with pytest.raises(EngineMissingError, match=says) as caught:
        bindings.import_llama_cpp()
    assert "pip install" in str(caught.value)


def test_another_version_is_refused(package):
    package.__version__ = "0.3.35"
    with pytest.raises(EngineMismatchError, match=r"0\.3\.35 is installed .* known for 0\.3\.36 only"):
        bindings.import_llama_cpp()


def test_it_lacks_a_function(package):
    del package.llama_cpp.llama_memory_seq_rm
    with pytest.raises(EngineMismatchError, match="lacks llama_memory_seq_rm; reinstall"):
        bindings.bindings_of_llama_h(package)


def test_another_engine_runs_here(monkeypatch):
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    other = SimpleNamespace(library_paths=(Path("/somewhere/xllamacpp.abi3.so"),))
    monkeypatch.setattr(LoadedEngine, "_loaded", other)
    with pytest.raises(EngineMismatchError, match="already runs the engine /somewhere/xllamacpp"):
        bindings.import_llama_cpp()


def test_a_library_without_llama_in_it(package):
    with pytest.raises(EngineMismatchError, match="LLAMA_CPP_LIB_PATH"):
        bindings.find_library(package.llama_cpp)


def test_the_files_of_libraries():
    assert libraries_in_use(ct.CDLL("libc.so.6"), ["printf", "no_such_thing", "fopen"])[0].name.startswith(
        "libc"
    )
    assert libraries_in_use(ct.CDLL("libc.so.6"), ["no_such_thing"]) == ()


def test_no_hash_is_known_of_a_library_that_pip_compiles():
    require_pinned(Engine("llama-cpp-python", "0.3.36", (Path("/x"),), "0" * 64, pin=LLAMA_CPP_PYTHON))
    with pytest.raises(EngineMismatchError):
        require_pinned(Engine("llama-cpp-python", "0.3.35", (Path("/x"),), "0" * 64))


def test_the_layout_of_the_parameters_is_compared(package):
    engine = Engine("llama-cpp-python", "0.3.36", (Path("/x"),), "", pin=LLAMA_CPP_PYTHON)
    same = {"devices": None, "n_gpu_layers": -1, "use_extra_bufts": True}
    bindings.check_layout(package.llama_cpp, {"model": same}, engine)
    with pytest.raises(EngineMismatchError, match=r"n_gpu_layers: recorded 0, now -1"):
        bindings.check_layout(package.llama_cpp, {"model": {**same, "n_gpu_layers": 0}}, engine)
    with pytest.raises(EngineMismatchError, match=r"no_host: recorded False, missing"):
        bindings.check_layout(package.llama_cpp, {"model": {**same, "no_host": False}}, engine)


# ---- loads


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


# ---- batches


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
        self.manager = SimpleNamespace(require_no_leases_here=lambda _what: None)

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


# ---- the class


class ToyEngine:
    """Stands in for the loaded engine, which has the CPU only."""

    proxy = SimpleNamespace(
        expertier_proxy_device_name=lambda index: b"CPU" if index == 0 else None,
        expertier_device_is_host=lambda _: 1,
    )

    def stock_devices(self) -> None:
        return None


class ToyModel:
    """Stands in for the model that is opened with tiers."""

    opened: ClassVar[list[dict[str, Any]]] = []

    def __init__(self) -> None:
        self.binding = SimpleNamespace(take_error=lambda: ("", None))
        self.closed = 0

    @classmethod
    def open(cls, engine: Any, path: Path, **options: Any) -> ToyModel:
        cls.opened.append({"engine": engine, "path": path, **options})
        return cls()

    def hand_over(self) -> int:
        return 55

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def drop_in(package: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with our class, over the stand-ins."""
    monkeypatch.setattr(package.llama_cpp, "llama_get_memory", lambda _: None)
    for variable in [name for name in os.environ if name.startswith("MOE_")]:
        monkeypatch.delenv(variable)
    module = importlib.import_module(f"{HERE}.llama")
    monkeypatch.setattr(module, "open_bindings", lambda _progress: ToyEngine())
    monkeypatch.setattr(module, "LlamaModel", ToyModel)
    monkeypatch.setattr(ToyModel, "opened", [])
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_model(tmp_path, "F32")


def test_the_arguments_go_to_stock_and_the_budgets_to_the_tiers(drop_in, model, monkeypatch):
    monkeypatch.setenv("MOE_EXPERT_CACHE_MIB", "9")
    monkeypatch.setenv("MOE_POLICY", "lru")
    llama = drop_in.Llama(
        model, expert_cache_mib=8, host_pool_mib="2", n_ctx=64, n_gpu_layers=-1, verbose=False
    )
    assert isinstance(llama, sys.modules["llama_cpp"].Llama)
    assert llama.model_path == str(model)
    assert llama.arguments == {"n_ctx": 64, "n_gpu_layers": -1, "verbose": False}
    assert llama.tiers.stats().l1.budget_bytes == 8 << 20
    assert llama.tiers.stats().l2.budget_bytes == 2 << 20
    (opened,) = ToyModel.opened
    assert opened["tiers"] is llama.tiers
    assert isinstance(opened["params"], Params)
    again = drop_in.Llama(**llama.__getstate__())
    assert again.tiers.stats().l1.budget_bytes == 8 << 20
    assert llama.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    for each in (llama, again):
        each.close()
        each.close()


def test_the_variables_count_where_no_argument_is(drop_in, model, monkeypatch):
    monkeypatch.setenv("MOE_EXPERT_CACHE_MIB", "7")
    llama = drop_in.Llama(str(model), verbose=False)
    assert llama.tiers.stats().l1.budget_bytes == 7 << 20
    llama.close()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"expert_cache_mib": "much"}, ConfigError, "MOE_EXPERT_CACHE_MIB='much' cannot be read"),
        ({"expert_cache_mib": 0}, ConfigError, "MOE_EXPERT_CACHE_MIB=0"),
        ({"host_pool_frac": 101}, ConfigError, "MOE_HOST_POOL_FRAC='101'"),
        ({"policy": "best"}, ConfigError, "MOE_POLICY='best'"),
        ({"expert_cache_mib": 0.001}, BudgetError, "at least"),
        ({"vocab_only": True}, ConfigError, "vocab_only=True cannot be used with tiers"),
        ({"lora_path": "a.gguf"}, ConfigError, "lora_path='a.gguf' cannot be used with tiers"),
    ],
)
def test_what_is_refused(drop_in, model, arguments, error, says):
    with pytest.raises(error, match=says):
        drop_in.Llama(model, verbose=False, **arguments)
    assert ToyModel.opened == []


def test_a_model_without_experts_is_refused(drop_in, tmp_path):
    with suppress(NotMoeError):
        write_raw_model(tmp_path / "dense.gguf", [None, None])
    with pytest.raises(NotMoeError, match="dense model"):
        drop_in.Llama(tmp_path / "dense.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(NotGgufError):
        drop_in.Llama(tmp_path / "text.gguf")


def test_a_failure_after_the_load_frees_everything(drop_in, model, monkeypatch):
    def fail(*_):
        raise ValueError("Failed to create llama_context")

    monkeypatch.setattr(drop_in, "WatchedBatches", fail)
    managers = []
    real = drop_in.open_engine_tiers

    def open_tiers(*arguments: Any) -> Any:
        opened = real(*arguments)
        managers.extend(opened.tiers.managers)
        return opened

    monkeypatch.setattr(drop_in, "open_engine_tiers", open_tiers)
    with pytest.raises(ValueError, match="llama_context"):
        drop_in.Llama(model, verbose=False)
    with pytest.raises(LeaseError, match="closed"):
        managers[0].acquire(0, [0])


def test_an_interrupt_at_any_time_frees_everything(drop_in, model, monkeypatch):
    managers, kept = [], []
    real = drop_in.open_engine_tiers

    def open_tiers(*arguments: Any) -> Any:
        opened = real(*arguments)
        managers.extend(opened.tiers.managers)
        return opened

    def open_and_close() -> None:
        kept.append(drop_in.Llama(model, expert_cache_mib=3, host_pool_mib=0, verbose=False))
        kept[-1].close()

    monkeypatch.setattr(drop_in, "open_engine_tiers", open_tiers)
    open_and_close()
    gc.collect()
    gc.freeze()
    folders = [str(Path(drop_in.__file__).parents[1]) + "/"]
    n = n_instructions(open_and_close, folders)
    n_done = 0
    for found in at_every_instruction(open_and_close, folders, at=range(5, n - 5, n // 12)):
        assert isinstance(found.error, KeyboardInterrupt), found
        del found
        kept.clear()
        gc.collect()
        close_abandoned()
        for manager in managers:
            with pytest.raises(LeaseError, match="closed"):
                manager.acquire(0, [0])
        managers.clear()
        n_done += 1
    gc.unfreeze()
    assert n_done >= 10
    open_and_close()


def test_a_stock_class_that_loads_otherwise_is_refused(drop_in, model, monkeypatch):
    monkeypatch.setattr(StockLlama, "loads", False)
    with pytest.raises(EngineMismatchError, match="no tiers are in it"):
        drop_in.Llama(model, verbose=False)


def test_a_stock_class_of_another_make_is_refused(drop_in, model, monkeypatch):
    monkeypatch.setattr(drop_in, "_OWN", ("_ctx", "_renamed"))
    with pytest.raises(EngineMismatchError, match="has no _renamed"):
        drop_in.Llama(model, verbose=False)


# ---- what the host library does for it, over the engine of the other tests


def test_parameters_of_another_size_are_refused(loaded_engine, model):
    with (
        make_tiers(model, 2) as tiers,
        pytest.raises(EngineError, match=r"parameters of 16 bytes, the engine's"),
    ):
        LlamaModel.open(loaded_engine, model, tiers=TierSet.of(tiers), params=Params())


def test_a_model_that_was_handed_over_is_freed_by_who_has_it(loaded_engine, model):
    with make_tiers(model, 2) as tiers:
        opened = LlamaModel.open(loaded_engine, model, tiers=TierSet.of(tiers))
        handle = opened.hand_over()
        free = loaded_engine.symbol("llama_model_free", None, ct.c_void_p)
        assert opened.n_vocab == loaded_engine.symbol("llama_vocab_n_tokens", ct.c_int32, ct.c_void_p)(
            loaded_engine.symbol("llama_model_get_vocab", ct.c_void_p, ct.c_void_p)(handle)
        )
        free(handle)
        opened.close()


def test_the_devices_of_other_loads_are_none_of_ours(loaded_engine):
    assert loaded_engine.proxy
    devices = ct.cast(loaded_engine.stock_devices(), ct.POINTER(ct.c_void_p))
    assert devices[0] is None, "this machine's engine has the CPU only"


# ---- the real package


@pytest.fixture(scope="module")
def site(engine_cache: Path) -> Path:
    """The real package, compiled as pip does it, in a folder of the cache; minutes the first time."""
    kept = engine_cache / "test-builds" / f"llama-cpp-python-{LLAMA_CPP_PYTHON.version}"
    if kept.exists():
        return kept
    fresh = kept.with_name(f"{kept.name}.tmp")
    needs = ["diskcache", "jinja2", "markupsafe", "typing-extensions"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", fresh]
    subprocess.run(
        [*pip, LLAMA_CPP_PYTHON.requirement, *needs],
        env={**os.environ, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
        check=True,
        timeout=120,
    )
    fresh.rename(kept)
    return kept


def run_scenario(site: Path, scenario: str, folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """Run a function of `drop_in_runs` on the real package; return its result and standard error."""
    support = Path(__file__).parents[2] / "support"
    ended = subprocess.run(
        [sys.executable, "-m", "engine_runs.drop_in_runs", scenario, folder, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{support}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said, ended.stderr


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K+Q6_K"])
def test_the_output_is_that_of_stock(site: Path, tmp_path: Path, kind: str) -> None:
    said, _ = run_scenario(site, "parity", tmp_path, kind=kind)
    assert set(said) == {"one", "below top-k", "top-k", "half", "all"}
    for slots, found in said.items():
        assert found["logits"], f"other logits with {slots} slots"
        assert found["completion"], f"another completion with {slots} slots"
        assert found["chat"], f"another answer with {slots} slots"
        assert found["stream"], f"another stream with {slots} slots"
        assert found["stock_after"], "another stock model once the proxy is there"
        assert found["expert_bytes_read"] == 0
        assert found["expert_bytes_skipped"] > 0
        assert found["hits"] > 0 or slots in ("one", "all"), "with a slot for each, nobody asks any more"
        assert found["pass_calls"] > 0 or slots == "all"


@pytest.mark.deep
def test_states_and_resets_are_those_of_stock(site: Path, tmp_path: Path) -> None:
    said, _ = run_scenario(site, "states", tmp_path)
    assert all(said.values()), said


@pytest.mark.deep
def test_two_models_in_one_process(site: Path, tmp_path: Path) -> None:
    said, _ = run_scenario(site, "two_models", tmp_path)
    assert all(said.values()), said


@pytest.mark.deep
@pytest.mark.parametrize("architecture", ["qwen3moe", "nemotron_h_moe"])
def test_a_failed_read_raises_and_the_next_call_works(site: Path, tmp_path: Path, architecture: str) -> None:
    said, _ = run_scenario(site, "failed_reads", tmp_path, architecture=architecture)
    assert all(said.values()), said


@pytest.mark.deep
def test_ctrl_c_is_raised_after_the_batch(site: Path, tmp_path: Path) -> None:
    said, _ = run_scenario(site, "interrupted", tmp_path)
    assert all(said.values()), said


@pytest.mark.deep
def test_everything_is_freed(site: Path, tmp_path: Path) -> None:
    said, _ = run_scenario(site, "freed", tmp_path)
    assert all(said.values()), said


@pytest.mark.deep
def test_errors_over_the_real_package(site: Path, tmp_path: Path) -> None:
    said, _ = run_scenario(site, "errors", tmp_path)
    assert all(said.values()), said


@pytest.mark.deep
def test_the_end_of_a_process_with_a_model_open_is_quiet(site: Path, tmp_path: Path) -> None:
    said, stderr = run_scenario(site, "left_open", tmp_path)
    assert said["text"]
    assert "Traceback" not in stderr
    assert "ignored" not in stderr


@pytest.mark.deep
@pytest.mark.parametrize("verbose", [False, True])
def test_what_is_printed(site: Path, tmp_path: Path, verbose: bool) -> None:
    _, stderr = run_scenario(site, "left_open", tmp_path, verbose=verbose)
    assert ("llama_model_loader" in stderr) is verbose
    assert ("load_tensors" in stderr) is verbose
    assert "load_backend" not in stderr
