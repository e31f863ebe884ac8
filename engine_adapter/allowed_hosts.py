"""The host names by which clients may address a server, so that no foreign web page can use it.

A page of evil.example may have its own name resolve to 127.0.0.1, and its requests then reach a server on loopback as
if they came from the same site ("DNS rebinding"). Such a request still says `Host: evil.example`. A page that sends a
request to another site gives its own site in `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from expertier.errors import ConfigError

_WITH_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names of loopback, and the names that the user gave."""

    names: frozenset[str]
    every_address: bool
    """Whether the server listens on all addresses of the machine; then the address of each request is allowed too."""

    @classmethod
    def of(cls, host: str, more: Iterable[str] = ()) -> Self:
        """Allow the names of `--host` and `--allow-host`. Raises ConfigError for a text that cannot be a name."""
        given = [_plain(host), *(_given(name) for name in more)]
        addresses = [address for name in given if (address := _address(name)) is not None]
        return cls(frozenset(given), any(address.is_unspecified for address in addresses))

    def allows_host(self, value: str | None, came_in_at: str | None = None) -> bool:
        """Whether a request with this `Host` may be answered; `came_in_at` is the address that it came in at."""
        match = _WITH_PORT.fullmatch(value or "")
        return match is not None and self._allows(_plain(match[1]), came_in_at)

    def allows_origin(self, value: str | None, came_in_at: str | None = None) -> bool:
        """Whether a request with this `Origin` may be answered; requests of programs have none."""
        if value is None:
            return True
        try:
            name = urlsplit(value).hostname
        except ValueError:
            return False
        return name is not None and self._allows(_plain(name), came_in_at)

    def _allows(self, name: str, came_in_at: str | None) -> bool:
        if name in self.names or name == "localhost":
            return True
        address = _address(name)
        if address is None:
            return False
        return address.is_loopback or (self.every_address and address == _address(came_in_at or ""))


def _given(name: str) -> str:
    """Return a name that a user gave, perhaps with a port, which does not matter."""
    match = _WITH_PORT.fullmatch(name.strip())
    if match is None and _address(_plain(name)) is None:
        raise ConfigError(
            f"--allow-host {name!r} is no name or address: give it as clients have it in their address, such as "
            "box.lan or 192.168.1.5"
        )
    return _plain(match[1] if match else name)


def _plain(name: str) -> str:
    """Return a name as it is compared: no brackets, no dot at the end, small letters."""
    return name.strip().strip("[]").rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that the text is; None for a name."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
