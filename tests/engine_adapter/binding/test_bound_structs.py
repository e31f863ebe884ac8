"""What C++ reads of the tiers, after moves of the boundary: the same as if they were described anew."""

from __future__ import annotations

import ctypes as ct
from typing import Any

import expertier as et
from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.bound_structs import BoundStructs
from expertier.hip.host import HostDevice
from expertier.testing import LayerShape, PatternSource, synthetic_table

TABLE = synthetic_table([LayerShape(n_experts=8), LayerShape(types=("Q4_0", "Q4_0", "Q8_0"), n_experts=12)])


def fields_of(struct: ct.Structure, *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: getattr(struct, name) for name, kind in struct._fields_ if name not in but and kind is not None
    }


def read(binding: abi.Binding) -> list[Any]:
    """All numbers of layers, matrices and copies, found by the pointers as C++ does."""
    found: list[Any] = [binding.directory, binding.n_layers, binding.slab_base]
    for i in range(binding.n_layers):
        layer = binding.layers[i]
        found.append(fields_of(layer, but=("matrices", "copies")))
        found += [fields_of(layer.matrices[j]) for j in range(layer.n_matrices)]
        found += [fields_of(layer.copies[j]) for j in range(layer.n_copies)]
    return found


def describe(tiers: et.TierManager) -> BoundStructs:
    return BoundStructs(tiers.engine.bind(), abi.FillCallback(), abi.LoadCallback(), abi.ReadCallback())


def test_moves_are_followed() -> None:
    budget = sum(demand.bytes_for(4) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0, fill_threads=0)
    device = HostDevice()
    with et.TierManager(
        TABLE, device=device, config=config, source=PatternSource(), compute_bytes=40_000
    ) as tiers:
        structs = describe(tiers)
        address = ct.addressof(structs.binding.layers[1].copies[0])
        seen = [read(structs.binding)]
        for n_bytes in (1000, 20_000, tiers.engine.most_compute_bytes, 0):
            tiers.engine.move_boundary(n_bytes)
            structs.rewrite(tiers.engine.layout())
            tiers.engine.unbind()
            assert read(structs.binding) == read(describe(tiers).binding)
            assert read(structs.binding) not in seen
            seen.append(read(structs.binding))
        assert ct.addressof(structs.binding.layers[1].copies[0]) == address, "C++ keeps the pointers"
        tiers.engine.unbind()
    device.close()
