"""Divides a number of bytes among claims that together exceed it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fair_shares(limit_bytes: int, claims: Sequence[int]) -> list[int]:
    """Divide `limit_bytes` in proportion to `claims`; return a share for each claim, which never exceeds it."""
    total = sum(claims)
    if total <= limit_bytes:
        return list(claims)
    return [limit_bytes * claim // total for claim in claims]


def class_quotas(
    limit_bytes: int, unit_bytes: Mapping[int, int], n_experts: Mapping[int, int]
) -> dict[int, int]:
    """Divide a pool among its size classes; return the bytes for each, in whole blocks.

    `unit_bytes` is what one block of each class takes, and `n_experts` the number of experts of its size. First each
    class gets one block, since a class without a block is of no use; a class whose experts have more bytes comes
    earlier. The rest is divided in proportion to the bytes of the classes' experts.
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
