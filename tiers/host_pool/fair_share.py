"""Who may have how much of what is too little for all. Pure arithmetic on bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fair_shares(limit_bytes: int, claims: Sequence[int]) -> list[int]:
    """Divide `limit_bytes` in proportion to what each claims; nobody gets more than that."""
    total = sum(claims)
    if total <= limit_bytes:
        return list(claims)
    return [limit_bytes * claim // total for claim in claims]


def class_quotas(
    limit_bytes: int, unit_bytes: Mapping[int, int], n_experts: Mapping[int, int]
) -> dict[int, int]:
    """Divide a pool among its size classes; return the bytes for each, in whole blocks.

    `unit_bytes` is what one block of each class takes and `n_experts` how many experts it is for. One block
    for every class comes first, as a class without any serves nobody, those with the most bytes before the
    others; what is left is divided in proportion to the bytes of the classes' experts.
    """
    wanted = {name: unit * n_experts.get(name, 0) for name, unit in unit_bytes.items()}
    by_need = sorted(wanted, key=lambda name: (-wanted[name], name))
    quotas = dict.fromkeys(unit_bytes, 0)
    left = limit_bytes
    for name in by_need:
        if wanted[name] and unit_bytes[name] <= left:
            quotas[name] = unit_bytes[name]
            left -= unit_bytes[name]
    served = [name for name in by_need if quotas[name]]
    extras = fair_shares(left, [wanted[name] - quotas[name] for name in served])
    for name, extra in zip(served, extras, strict=True):
        granted = extra // unit_bytes[name] * unit_bytes[name]
        quotas[name] += granted
        left -= granted
    for name in served:  # what rounding left over
        granted = min(left, wanted[name] - quotas[name]) // unit_bytes[name] * unit_bytes[name]
        quotas[name] += granted
        left -= granted
    return quotas
