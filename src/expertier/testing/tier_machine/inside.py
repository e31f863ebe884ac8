"""The one place of the machine that looks behind `TierManager`'s public names."""

from __future__ import annotations

from expertier.testing.tier_machine.model import ExpertKey, View
from expertier.tiers.manager import TierManager
from expertier.tiers.model.slot_layout import Place


class Inside:
    """Reads a manager's tables and stores; changes nothing."""

    def __init__(self, tiers: TierManager) -> None:
        """Look into `tiers`."""
        self._tiers = tiers
        self._residency = tiers._residency
        self._slab = tiers._slab
        self._pool = tiers._pool

    @property
    def base(self) -> int:
        """The slab's address."""
        return self._slab.base

    @property
    def slab_bytes(self) -> int:
        """The slab's size."""
        return self._slab.n_bytes

    @property
    def quotas(self) -> tuple[int, ...]:
        """How many slots the layers get when nothing is reserved."""
        return self._tiers._boundary.quotas

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert → slot of the layer's READY slots."""
        return self._residency.residents(layer)

    def pins(self, layer: int) -> list[int]:
        """Return how often each slot of the layer is pinned."""
        return self._residency.pins_of(layer)

    def places(self, layer: int) -> tuple[Place, ...]:
        """Return where the layer's matrices lie, from the slab's base."""
        return self._slab.places(layer)

    def copies(self) -> list[tuple[ExpertKey, int]]:
        """Return (expert, address) of the host pool's complete copies, oldest first."""
        return self._pool.copies()

    def misses_by_layer(self) -> list[int]:
        """Return how many experts each layer has missed."""
        return self._residency.by_layer("misses")

    def fills_by_layer(self) -> list[int]:
        """Return how many fills each layer has completed."""
        return self._residency.fills_by_layer()

    def view(self) -> View:
        """Return a view of the tiers as they are now."""
        layers = range(len(self._tiers.slots))
        residents = tuple(self.residents(layer) for layer in layers)
        ranks = []
        for layer in layers:
            order = self._residency.layer_view(layer).order
            ranks.append({expert: int(order[slot]) for expert, slot in residents[layer].items()})
        copies = tuple(key for key, _ in self.copies())
        return View(residents, tuple(ranks), copies, self._tiers.slots, self._tiers.stats())
