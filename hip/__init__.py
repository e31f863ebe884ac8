"""Devices: where expert bytes live and how they get there.

                 gpu_device, slab_memory, peers, bounce, cupy_interop          what others use
    ┌──────────────────────────┼───────────────────────────┐
    │ mover, move_plan,        │ memory, runtime,          │ vmm_probe,
    │ copy_choice              │ ownership, allocator      │ virtual_memory
    │ kernel_module            │                           │
    │ kernel_cache ────────────┴── gpu ── driver ──────────┘                       one GPU; a vendor's driver
    └ runtime_compiler             bindings, structs, codes, vendor, libraries     HIP's and CUDA's calls, one table

device.py            the protocol that every device fulfils, and `open_device`; choose.py finds the GPU
fence.py             points in a stream's work that others wait for
host.py              the host as a device: plain memory that it owns and counts
gpu_device.py        a GPU as a device, HIP or CUDA
gpu.py, driver.py    driver calls with a GPU current; calls, checked
bindings.py          the calls; structs.py, codes.py, vendor.py, libraries.py: what they take, return and are found in
runtime.py           streams and events that are owned; memory.py: buffers; ownership.py: what "owned" means
pinned_ranges.py     which host memory is pinned
mover.py             moves in few launches, planned by move_plan.py; copy_choice.py: kernel or copies
many_copies.py       copies of a batch in one call; copy_loop.py: the loop over the driver's, compiled
kernels/             the kernels' source; runtime_compiler.py, kernel_cache.py, kernel_module.py bring it to the GPU
virtual_memory.py    address space with memory under a part of it; vmm_probe.py: whether a driver can be trusted with it
slab_memory.py       the memory of a slab, plain or growing
peers.py, bounce.py  copies between GPUs, and from memory that is not pinned
cupy_interop.py      CuPy's arrays, streams and memory; stream_handle.py, allocator.py: what they plug into
fake/                HIP and CUDA without a GPU
fault_plan.py        which calls of which operation fail
faults.py            a device around a device, whose N-th calls fail
"""

from __future__ import annotations

from expertier.hip.device import Device, open_device

__all__ = ["Device", "open_device"]
