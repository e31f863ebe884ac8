"""The parts of `gpu_engine.py`: engine, models, rows, parity, and the files that make it resumable.

gpu_engine.py ─► llama_build   finds or builds llama.cpp
              ├► models        writes the models; routing: which experts they pick at each step
              ├► rows          what is measured ──► child ──► row_run      one row, in a process of its own
              ├► parity        what is compared ──► child ──► parity_run   one side, in a process of its own
              ├► results       what was measured already
              └► report        the tables
"""
