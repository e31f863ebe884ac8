"""GPUs for llama.cpp that are none: devices of ggml's with memory of their own, streams and events, on the CPU.

README.md has a picture of the layers and a line for each file.
"""

from __future__ import annotations

from fake_ggml_gpu.library import FakeGpu, FakeGpus, build_fake_gpu

__all__ = ["FakeGpu", "FakeGpus", "build_fake_gpu"]
