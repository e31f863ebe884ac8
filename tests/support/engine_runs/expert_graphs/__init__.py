"""Graphs around a layer's experts, as an engine may build them: C++ that builds and runs them, by name.

`case.h` is what a graph is built from; `nodes`, `cuts`, `terms`, `refusals` and `random` build graphs; `run.cpp` runs
them on a device; `library.py` compiles and calls that.
"""

from __future__ import annotations

from engine_runs.expert_graphs.library import NOT_RESTORED, THROWN, ExpertGraphs, GraphResult

__all__ = ["NOT_RESTORED", "THROWN", "ExpertGraphs", "GraphResult"]
