"""The parts of `gpu_engine.py`: engine, models, rows, parity, and the files that make it resumable.

gpu_engine.py ─► options       the command line; settings: what of it every measurement takes
              ├► llama_build   finds or builds llama.cpp
              ├► models        writes the models; routing: which experts they pick at each step
              ├► rows          what is measured ──► child ──► row_run      one row, in a process of its own
              │                                           └─► moves_run    moves of the boundary, the same
              ├► cold          cold starts ───────► child ──► cold_run     one start, in a process of its own
              ├► parity        what is compared ──► child ──► parity_run   one side, in a process of its own
              ├► results       what was measured already
              └► report        the tables
"""
