"""The bugs in engine_adapter that quick tests over the fakes must catch: in C++, and in its Python."""

from __future__ import annotations

from mutants.adapter_catalogue import ADAPTER_MUTANTS
from mutants.proxy_catalogue import PROXY_MUTANTS
from mutants.slots_catalogue import SLOT_MUTANTS

ENGINE_MUTANTS = (*PROXY_MUTANTS, *SLOT_MUTANTS, *ADAPTER_MUTANTS)
