"""Devices: the memory that holds expert bytes, and the copies into it. README.md here lists the rooms."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.hip.open import open_device

__all__ = ["Device", "open_device"]
