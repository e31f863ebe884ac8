"""One file of a model, and which of the model's bytes it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertier.tiers.model.file_identity import FileIdentity


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that holds the bytes `begin` to `begin + identity.n_bytes` of the model.

    Offsets in a model of several shards count as if the shards lay one after another, from 0.
    """

    path: Path
    begin: int
    identity: FileIdentity

    @property
    def end(self) -> int:
        """One past the model's last byte that lies in this file."""
        return self.begin + self.identity.n_bytes
