"""`llama_cpp.Llama` with the experts in the tiers."""

from __future__ import annotations

import os
import sys
from typing import Any

from expertier.engine_adapter.abi.type_sizes import EngineTypes
from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.engine_adapter.build.progress import silent
from expertier.engine_adapter.hosts.llama_cpp_python.batches import WatchedBatches
from expertier.engine_adapter.hosts.llama_cpp_python.bindings import import_llama_cpp, open_bindings
from expertier.engine_adapter.hosts.llama_cpp_python.loading import as_parameters, served_by, wrap
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.open import open_tiers
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import ConfigError, EngineError, EngineMismatchError
from expertier.interrupts import interrupts_deferred, raise_pending
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet

llama_cpp: Any = import_llama_cpp()

Budget = int | float | str | None
"""A number, a text such as `auto`, or None for the variable's value."""

_NOT_WITH_TIERS = {
    "vocab_only": "it loads no experts: use llama_cpp.Llama for it",
    "lora_path": "the engine keeps an adapter in the buffers of the weights that it changes, and the tiers' buffers "
    "have no memory for one; it is not checked here which weights this adapter changes: merge it into the model",
}
_OWN = ("_ctx", "_stack", "_requires_eval")
"""The attributes of a Llama that we use."""


class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """A `llama_cpp.Llama` that never loads its experts: they are served by tiers with set budgets.

    It takes what `llama_cpp.Llama` takes, and four arguments that go before the variable of the same name:
    `expert_cache_mib` (MOE_EXPERT_CACHE_MIB, L1), `host_pool_mib` (MOE_HOST_POOL_MIB, L2), `host_pool_frac`
    (MOE_HOST_POOL_FRAC) and `policy` (MOE_POLICY).

    All layers run on the CPU, on the proxy's device, and nothing is mapped: `n_gpu_layers`, `split_mode`,
    `main_gpu`, `tensor_split`, `use_mmap` and `use_mlock` are accepted and change nothing. Weights are not repacked.
    """

    _tiered: TieredModel | None = None

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache_mib: Budget = None,
        host_pool_mib: Budget = None,
        host_pool_frac: Budget = None,
        policy: str | None = None,
        **arguments: Any,
    ) -> None:
        """Make the tiers, load the model through them and open its context.

        Raises:
            ConfigError: a budget or variable that cannot be read, or an argument that tiers cannot serve.
            ModelError: the file is no usable MoE model (NotMoeError: it has no experts). BudgetError: a budget is
                below what the model needs. EngineError: llama-cpp-python or the plugin for it cannot be used, or the
                engine refused the model.
        """
        for name, why in _NOT_WITH_TIERS.items():
            if arguments.get(name):
                raise ConfigError(f"{name}={arguments[name]!r} cannot be used with tiers: {why}")
        self._budgets = {
            "expert_cache_mib": expert_cache_mib,
            "host_pool_mib": host_pool_mib,
            "host_pool_frac": host_pool_frac,
            "policy": policy,
        }
        config = tier_config(self._budgets)
        say = _say if arguments.get("verbose", True) else silent
        table = ExpertTable.from_gguf(model_path, EngineTypes(lambda: open_bindings(say)))
        engine = open_bindings(say)
        wrap(llama_cpp, engine.stock_devices)
        shape = ContextShape(
            n_ctx=arguments.get("n_ctx") or 512,
            n_ubatch=arguments.get("n_ubatch") or 512,
            full_windows=bool(arguments.get("swa_full")),
        )
        try:
            with interrupts_deferred():  # an interrupted load could not be undone
                self._open(engine, table, config, shape, os.fspath(model_path), arguments)
        except BaseException:
            self.close()  # needed even where the load succeeded and the end of the region raised
            raise

    def _open(
        self,
        engine: LoadedEngine,
        table: ExpertTable,
        config: TierConfig,
        shape: ContextShape,
        path: str,
        arguments: dict[str, Any],
    ) -> None:
        """Make the tiers, and have `llama_cpp.Llama` load the model through them and open its context."""
        tiers, placement = open_tiers(engine, table, config, shape)

        def open_model(params: Any) -> int:
            model = LlamaModel.open(
                engine, table.path, tiers=tiers, placement=placement, params=as_parameters(params)
            )
            self._tiered = TieredModel(model, tiers, placement)
            return model.hand_over()

        try:
            raise_pending()
            with served_by(open_model):
                super().__init__(path, **arguments)
            if lacking := [name for name in _OWN if not hasattr(self, name)]:
                raise EngineMismatchError(
                    f"llama_cpp.Llama has no {', '.join(lacking)}: use llama-cpp-python as it was installed"
                )
            self._ctx.decode = WatchedBatches(llama_cpp.llama_cpp, self._ctx.ctx, self.binding).decode
        except BaseException:
            self.close()
            tiers.close()
            raise

    @property
    def tiered(self) -> TieredModel:
        """The model together with its tiers."""
        if self._tiered is None:
            raise EngineError("there are no tiers: the model was not loaded")
        return self._tiered

    @property
    def tiers(self) -> TierSet:
        """The tiers: `llama.tiers.stats()`."""
        return self.tiered.tiers

    @property
    def binding(self) -> BindingSet:
        """The tiers' binding to the proxy."""
        return self.tiered.binding

    def describe(self) -> dict[str, Any]:
        """Return the tiers' statistics, what loading read, and what the proxy counted, for a report."""
        return self.tiered.describe()

    def eval(self, tokens: Any) -> None:
        """Evaluate tokens as the stock class does. After an error, as in `WatchedBatches.decode`, they do not count."""
        try:
            super().eval(tokens)
        except BaseException:
            self._requires_eval = (
                True  # the logits that are there are not those of the last token that counts
            )
            raise

    def close(self) -> None:
        """Free context and model, then the tiers; a second call does nothing."""
        with interrupts_deferred():
            if hasattr(self, "_stack"):
                super().close()
            if self._tiered is not None:
                self._tiered.close()

    def __del__(self) -> None:
        """Close, as the stock class does; not at the end of the process, when much of Python no longer works."""
        if not sys.is_finalizing():
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments, budgets included, from which another object can be made."""
        return {**super().__getstate__(), **self._budgets}


def tier_config(budgets: dict[str, Budget], environ: dict[str, str] | None = None) -> TierConfig:
    """Return the variables with the arguments that are given over them. Errors: ConfigError."""
    given = {f"MOE_{name.upper()}": str(value) for name, value in budgets.items() if value is not None}
    return TierConfig.from_env(environ={**(os.environ if environ is None else environ), **given})


def _say(line: str) -> None:
    print(f"expertier: {line}", file=sys.stderr, flush=True)
