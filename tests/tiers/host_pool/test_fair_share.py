"""Shares of what is too little for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expertier.tiers.host_pool.fair_share import class_quotas, fair_shares

amounts = st.integers(0, 1 << 40)


def test_shares_are_in_proportion_and_no_more_than_was_claimed() -> None:
    assert fair_shares(100, [30, 60]) == [30, 60]
    assert fair_shares(60, [30, 60]) == [20, 40]
    assert fair_shares(0, [30, 60]) == [0, 0]
    assert fair_shares(0, []) == []
    assert fair_shares(5, [0, 0]) == [0, 0]


@given(amounts, st.lists(amounts, max_size=6))
def test_shares_fit(limit: int, claims: list[int]) -> None:
    shares = fair_shares(limit, claims)
    assert sum(shares) <= limit or sum(claims) == sum(shares) == 0
    assert all(0 <= share <= claim for share, claim in zip(shares, claims, strict=True))
    assert sum(shares) > min(limit, sum(claims)) - max(1, len(claims)), "more than rounding was lost"


def test_quotas_follow_the_bytes_of_the_experts() -> None:
    assert class_quotas(60, {1: 1, 2: 2}, {1: 40, 2: 40}) == {1: 20, 2: 40}
    assert class_quotas(1000, {1: 1, 2: 2}, {1: 40, 2: 40}) == {1: 40, 2: 80}


def test_every_size_gets_one_block_first_the_largest_need_before_the_others() -> None:
    assert class_quotas(10, {1: 1, 9: 9}, {1: 1000, 9: 1}) == {1: 1, 9: 9}
    assert class_quotas(5, {2: 2, 4: 4}, {2: 10, 4: 10}) == {2: 0, 4: 4}
    assert class_quotas(5, {2: 2, 4: 4}, {2: 30, 4: 10}) == {2: 4, 4: 0}


def test_a_size_without_experts_gets_nothing() -> None:
    assert class_quotas(100, {1: 1, 2: 2}, {2: 10}) == {1: 0, 2: 20}


@given(amounts, st.dictionaries(st.integers(1, 1 << 24), st.integers(0, 5000), max_size=5))
def test_quotas_fit_in_whole_blocks(limit: int, n_experts: dict[int, int]) -> None:
    units = {block: block + block % 7 for block in n_experts}
    quotas = class_quotas(limit, units, n_experts)
    assert sum(quotas.values()) <= limit
    for block, quota in quotas.items():
        assert quota % units[block] == 0
        assert 0 <= quota <= units[block] * n_experts[block]
    hungry = [b for b in quotas if 0 < quotas[b] < units[b] * n_experts[b]]
    assert all(units[block] > limit - sum(quotas.values()) for block in hungry), "room was left over"
