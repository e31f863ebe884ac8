"""Devices: where expert bytes live and how they get there. README.md beside this file lists the rooms."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.hip.open import open_device

__all__ = ["Device", "open_device"]
