"""Devices: where expert bytes live and how they get there.

device.py       the protocol that every device fulfils, and `open_device`
fence.py        points in a stream's work that others wait for
host.py         the host as a device: plain memory that it owns and counts
fault_plan.py   which calls of which operation fail
faults.py       a device around a device, whose N-th calls fail
"""

from __future__ import annotations

from expertier.hip.device import Device, open_device

__all__ = ["Device", "open_device"]
