"""Subsequences against brute force."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sp_compiler.graph_diff.subsequences import longest_common, longest_increasing

_texts = st.lists(st.sampled_from("abc"), max_size=7)


def _subsequences(values: list[str]) -> set[tuple[str, ...]]:
    return {
        subset for size in range(len(values) + 1) for subset in itertools.combinations(values, size)
    }


@given(_texts, _texts)
def test_longest_common(old: list[str], new: list[str]) -> None:
    pairs = longest_common(old, new)
    assert all(old[first] == new[second] for first, second in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert len(pairs) == max(map(len, _subsequences(old) & _subsequences(new)))


@given(st.permutations(range(7)))
def test_longest_increasing(values: list[int]) -> None:
    kept = sorted(longest_increasing(values))
    chosen = [values[index] for index in kept]
    assert chosen == sorted(chosen)
    increasing = (
        subset
        for size in range(8)
        for subset in itertools.combinations(values, size)
        if list(subset) == sorted(subset)
    )
    assert len(chosen) == max(map(len, increasing))


def test_empty() -> None:
    assert longest_common([], ["a"]) == []
    assert longest_increasing([]) == set()
