"""Collects the stats of one device's tiers, and checks their invariants."""

from __future__ import annotations

from expertier.tiers.assemble import Assembly
from expertier.tiers.engine.prefill_stream import resolve_stream_tokens
from expertier.tiers.shared.stats import L1Stats, TierStats


def stats_of(parts: Assembly) -> TierStats:
    """Return the sizes of the tiers now, and their counts so far."""
    totals = parts.residency.totals()
    layout = parts.slab.layout
    bytes_of = parts.table.bytes_of
    l1 = L1Stats(
        budget_bytes=parts.boundary.arena_bytes,
        used_bytes=layout.used_bytes,
        compute_bytes=layout.compute_bytes,
        rounding_bytes=layout.rounding_bytes,
        memory_bytes=parts.slab.memory_bytes,
        slots=sum(parts.slab.slots),
        hits=totals["hits"],
        misses=totals["misses"],
        evictions=totals["evictions"],
        bytes_in=bytes_of(parts.residency.fills_by_layer()),
    )
    return TierStats(
        l1,
        parts.pool.stats(),
        parts.source.stats(),
        parts.relayout.stats(),
        parts.prefetcher.stats(
            bytes_of(parts.residency.by_layer("prefetches_useful")),
            bytes_of(parts.residency.by_layer("prefetches_wasted")),
        ),
    )


def check_parts(parts: Assembly) -> None:
    """Assert the invariants of each store and those between stores; nothing else may use the tiers meanwhile."""
    parts.slab.check_valid()
    parts.pool.check_valid()
    parts.residency.check_valid()
    assert tuple(parts.residency.n_slots.tolist()) == parts.slab.slots, "tables and slab differ in slots"
    _check_pins(parts)
    stats = stats_of(parts)
    totals = parts.residency.totals()
    misses, filled, prefetched = stats.l1.misses, totals["fills"], totals["prefetches"]
    assert filled <= misses + prefetched, f"{filled} fills for {misses} misses and {prefetched} prefetches"
    if not resolve_stream_tokens(parts.config, parts.device):  # the prefill stream asks L2 without asking L1
        # `stats.prefetch.asked` lacks an engine's own prefetches: completed ones are in `prefetched`, others in aborts.
        asked = misses + stats.prefetch.asked + prefetched + totals["aborts"]
        assert stats.l2.hits + stats.l2.misses <= asked, "L2 was asked more often than L1 missed"


def _check_pins(parts: Assembly) -> None:
    """Assert that each slot has as many pins as leases hold its expert (I7)."""
    leases = parts.usage.leases()
    for layer, n_slots in enumerate(parts.slab.slots):
        expected = [0] * n_slots
        for lease in leases:
            if lease.layer == layer and lease.held is not None:
                owners = parts.residency.residents(layer)
                for expert, slot in zip(lease.held.experts.tolist(), lease.held.slots.tolist(), strict=True):
                    expected[slot] += 1
                    assert owners.get(expert) == slot, (
                        f"layer {layer}: leased expert {expert} left slot {slot}"
                    )
        pins = parts.residency.pins_of(layer)
        assert pins == expected or parts.usage.bound, f"layer {layer}: pins {pins}, leases {expected}"
