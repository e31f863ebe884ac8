"""The structures of virtual memory management, which have the same bytes in CUDA and in HIP from 7.1 on.

HIP 5 has the fields of the properties in another order, so do not copy from headers older than 7.1.
"""

from __future__ import annotations

import ctypes

LOCATION_DEVICE = 1
ALLOCATION_PINNED = 1
ACCESS_READ_WRITE = 3


class Location(ctypes.Structure):
    """Where memory is: with the `type` LOCATION_DEVICE, `id` is the device's number."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """Flags of an allocation; we leave all of them zero."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """The kind of physical memory to create; the structure has 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("os_metadata", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescriptor(ctypes.Structure):
    """Which device may access a mapping, and how; the structure has 12 bytes."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def device_memory(ordinal: int) -> AllocationProperties:
    """Return the properties of memory on a device."""
    properties = AllocationProperties()
    properties.type = ALLOCATION_PINNED
    properties.location = Location(LOCATION_DEVICE, ordinal)
    return properties


def read_write(ordinals: list[int]) -> ctypes.Array[AccessDescriptor]:
    """Return descriptors that let the devices read and write, in the order of `ordinals`."""
    descriptors = (AccessDescriptor * len(ordinals))()
    for descriptor, ordinal in zip(descriptors, ordinals, strict=True):
        descriptor.location = Location(LOCATION_DEVICE, ordinal)
        descriptor.flags = ACCESS_READ_WRITE
    return descriptors
