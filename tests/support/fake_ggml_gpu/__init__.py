"""GPUs for llama.cpp that are none: devices of ggml's with memory of their own, streams and events, on the CPU.

| file | job |
|---|---|
| `state` | switches, counters, faults, calls that fail on purpose |
| `memory` | device memory that nobody else can touch, with a limit; pinned memory |
| `stream` | queues of work, each with a thread, and events |
| `buffers`, `copies` | ggml's buffers; queued copies, whose bytes are read when they are done |
| `snapshot` | a graph as it was when it was handed over |
| `races` | finds work that nobody ordered |
| `device_lookup` | the driver calls of the device look-up of decode graphs, and its kernel |
| `allreduce` | sums over the devices, as CUDA's backend has them |
| `backend`, `device` | ggml's interfaces, and the entry that it looks for |
| `control` | what `library.py` calls |
| `library.py`, `ggml.py` | compiles, loads, sets and reads; the calls of ggml's own that tests make |
| `process.py`, `models.py` | tests in a process with these devices; models on them |

They compute with the CPU's kernels, so that everything is bit-identical to stock on the CPU; all else is as CUDA's
backend does it: what is asynchronous there is here, what it recognises by an address is recognised so here, and what
ends the process there is a fault here, which is counted.
"""

from __future__ import annotations

from fake_ggml_gpu.library import FakeGpu, FakeGpus, build_fake_gpu

__all__ = ["FakeGpu", "FakeGpus", "build_fake_gpu"]
