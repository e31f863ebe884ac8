"""The drop-in for llama-cpp-python: scenarios on the real package, and stand-ins for it.

`python -m engine_runs.drop_in SCENARIO FOLDER OPTIONS` runs a scenario; each needs a process of its own, as a process
can have one engine. `stand_ins.py` is for tests without the package.
"""
