"""The two vendors, and the differences between their drivers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Vendor(StrEnum):
    """A vendor by the prefix of its device names: `hip:0`, `cuda:0`."""

    HIP = "hip"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Traits:
    """The values that differ between the vendors.

    `column` is the index of the vendor's symbols in `bindings.CALLS`. `attr_virtual_memory` is the number of a device
    attribute. Versions are encoded as the driver does it: HIP's as major * 10^7 + minor * 10^5 + patch, CUDA's as
    major * 1000 + minor * 10.
    """

    column: int
    library_names: tuple[str, ...]
    library_variable: str
    compiler_names: tuple[str, ...]
    compiler_variable: str
    attr_virtual_memory: int
    oldest_version: int
    oldest_vmm_version: int

    def version_text(self, version: int) -> str:
        """Return an encoded version in the usual form, such as 7.1.0."""
        if self.column == 0:
            return f"{version // 10_000_000}.{version // 100_000 % 100}.{version % 100_000}"
        return f"{version // 1000}.{version // 10 % 100}"


TRAITS: dict[Vendor, Traits] = {
    Vendor.HIP: Traits(
        column=0,
        library_names=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
        library_variable="EXPERTIER_HIP_LIBRARY",
        compiler_names=("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"),
        compiler_variable="EXPERTIER_HIPRTC_LIBRARY",
        attr_virtual_memory=89,
        # 6.0 is the first version whose properties structure has the architecture's name at `_ARCHITECTURE_OFFSET`.
        oldest_version=60_000_000,
        # Before 7.14 virtual memory is unreliable: docs/gpu-devices.md lists what was reported.
        oldest_vmm_version=71_400_000,
    ),
    Vendor.CUDA: Traits(
        column=1,
        library_names=("libcuda.so.1",),
        library_variable="EXPERTIER_CUDA_LIBRARY",
        compiler_names=("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"),
        compiler_variable="EXPERTIER_NVRTC_LIBRARY",
        attr_virtual_memory=102,
        oldest_version=12_000,
        oldest_vmm_version=12_000,
    ),
}
"""The traits of each vendor."""
