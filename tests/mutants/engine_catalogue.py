"""The bugs in engine_adapter that quick tests over the fakes must catch: in C++, and in its Python."""

from __future__ import annotations

from mutants.adapter_catalogue import ADAPTER_MUTANTS
from mutants.fills_catalogue import FILL_MUTANTS
from mutants.lookup_catalogue import LOOKUP_MUTANTS
from mutants.moves_catalogue import MOVE_MUTANTS

ENGINE_MUTANTS = (*LOOKUP_MUTANTS, *FILL_MUTANTS, *MOVE_MUTANTS, *ADAPTER_MUTANTS)
