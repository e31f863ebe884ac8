"""One file of a model, at its place among the bytes of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertier.tiers.model.file_identity import FileIdentity


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file whose bytes are `begin` to `begin + identity.n_bytes` of the model.

    A model of several shards is addressed as if they lay one after another; a model of one file begins at 0.
    """

    path: Path
    begin: int
    identity: FileIdentity

    @property
    def end(self) -> int:
        """One past the model's last byte that lies in this file."""
        return self.begin + self.identity.n_bytes
