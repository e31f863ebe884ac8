"""Tries whether a GPU's virtual memory management works, in the steps at which drivers have been seen to fail."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from expertier.errors import DriverError
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import PinnedBuffer
from expertier.hip.driver.runtime import Stream
from expertier.hip.gpu.vmm.virtual_memory import LEAST_CHUNK_BYTES, VirtualRange
from expertier.units import KIB, mib

_SAMPLE_BYTES = 64 * KIB


class ProbeStep(StrEnum):
    """The steps of the probe, in their order; the values are what each step shows where it passes."""

    SUPPORT = "the driver has virtual memory management"
    VERSION = "the runtime is new enough"
    MAPPING = "memory can be reserved, created and mapped"
    SECOND_ACCESS = "a second mapping can be given access"
    READ_BACK = "what is written right after mapping reads back"
    RELEASE = "free memory returns when a chunk is released"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe: `failed` is the step that failed, None where all passed, and `detail` says how.

    `access_from_base` is the argument that `VirtualRange` needs for this driver.
    """

    failed: ProbeStep | None
    detail: str
    access_from_base: bool = False

    @property
    def passed(self) -> bool:
        """Whether virtual memory can be used."""
        return self.failed is None


class _StepError(Exception):
    def __init__(self, step: ProbeStep, detail: str) -> None:
        super().__init__(detail)
        self.step = step


def probe_vmm(gpu: Gpu, *, chunk_bytes: int = LEAST_CHUNK_BYTES) -> ProbeResult:
    """Try all steps with two chunks of device memory, which are given back. A driver's error is a failed step."""
    try:
        return ProbeResult(None, "all steps passed", _probe(gpu, chunk_bytes))
    except _StepError as error:
        return ProbeResult(error.step, str(error))


def _probe(gpu: Gpu, chunk_bytes: int) -> bool:
    traits = gpu.driver.traits
    if not gpu.driver.has("create") or not _supported(gpu):
        raise _StepError(ProbeStep.SUPPORT, "the driver reports no virtual memory")
    if gpu.version < traits.oldest_vmm_version:
        found, wanted = traits.version_text(gpu.version), traits.version_text(traits.oldest_vmm_version)
        raise _StepError(ProbeStep.VERSION, f"it is version {found}; the oldest trusted version is {wanted}")
    step = ProbeStep.MAPPING
    try:
        free_before = gpu.memory()[0]
        with VirtualRange(gpu, 2 * chunk_bytes, chunk_bytes=chunk_bytes) as memory:
            memory.grow_to(chunk_bytes)
            step = ProbeStep.SECOND_ACCESS
            _add_second(memory)
            step = ProbeStep.READ_BACK
            _check_read_back(memory, gpu)
            step = ProbeStep.RELEASE
            used = free_before - gpu.memory()[0]
            memory.shrink_to(0)
            # Measured while the addresses are still reserved.
            back = free_before - gpu.memory()[0]
            from_base = memory.access_from_base
    except DriverError as error:
        raise _StepError(step, str(error)) from error
    if back >= used - chunk_bytes:
        raise _StepError(
            step, f"two chunks took {mib(used)}, and {mib(max(0, back))} were still taken after their release"
        )
    return from_base


def _supported(gpu: Gpu) -> bool:
    try:
        return bool(gpu.attribute(gpu.driver.traits.attr_virtual_memory))
    except DriverError:
        return False


def _add_second(memory: VirtualRange) -> None:
    try:
        memory.grow_to(memory.reserved_bytes)
    except DriverError:
        memory.access_from_base = True
        memory.grow_to(memory.reserved_bytes)


def _check_read_back(memory: VirtualRange, gpu: Gpu) -> None:
    """Write to each chunk and read it back at once, on a stream that does not wait for stream 0."""
    n_chunks = memory.n_bytes // memory.chunk_bytes
    with PinnedBuffer(gpu, 2 * _SAMPLE_BYTES) as buffer, Stream(gpu) as stream:
        sent, received = buffer.array()[:_SAMPLE_BYTES], buffer.array()[_SAMPLE_BYTES:]
        for chunk in range(n_chunks):
            sent[:] = np.arange(_SAMPLE_BYTES, dtype=np.uint32).astype(np.uint8) | (chunk + 1)
            received[:] = 0
            place = memory.address + (chunk + 1) * memory.chunk_bytes - _SAMPLE_BYTES
            gpu.call("copy_in", place, buffer.address, _SAMPLE_BYTES, stream.handle)
            gpu.call("copy_out", buffer.address + _SAMPLE_BYTES, place, _SAMPLE_BYTES, stream.handle)
            stream.synchronize()
            wrong = int((sent != received).sum())
            if wrong:
                raise _StepError(
                    ProbeStep.READ_BACK, f"{wrong} of {_SAMPLE_BYTES} bytes of chunk {chunk} read back wrong"
                )
