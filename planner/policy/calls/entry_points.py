"""Addresses of the compiled policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EntryPoints:
    """Addresses of the policy's C functions, as attributes with the names in the table `operations.py`.

    The code stays loaded as long as this object (`native.entry_points` keeps the one that it made for good).
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        """Take the compiled functions by their operations' names."""
        self._owners = tuple(functions.values())
        self._addresses: dict[str, int] = {name: function.address for name, function in functions.items()}

    def __getattr__(self, name: str) -> int:
        """Return the address of the operation `name`."""
        addresses: dict[str, int] = self.__dict__.get("_addresses", {})
        if name not in addresses:
            raise AttributeError(
                f"asked for the policy's operation {name!r}: there are {', '.join(addresses)}"
            )
        return addresses[name]
