"""Correspondence of dims before and after a reshape, on shapes of all kinds."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_compiler.ir.reshapes import CommonFactors, common_factors, matching_spans

Shape = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn, count: int) -> Shape:
    """A shape of ``count`` elements, with dims of size 1 among the others."""
    shape = []
    while count > 1:
        shape.append(draw(st.sampled_from([d for d in range(2, count + 1) if count % d == 0])))
        count //= shape[-1]
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shape, Shape]:
    count = draw(st.sampled_from([1, 2, 12, 24, 60, 64, 210]))
    return draw(shapes(count)), draw(shapes(count))


def _boundaries(shape: Shape) -> set[int]:
    """Numbers of elements in front of each boundary between dims."""
    return {prod(shape[:dim]) for dim in range(len(shape) + 1)}


@given(pairs())
def test_spans_are_the_smallest_that_hold_the_same_elements(pair: tuple[Shape, Shape]) -> None:
    source, target = pair
    spans = matching_spans(source, target)
    for shape, ranges in zip(pair, zip(*spans, strict=True), strict=False):
        assert [dim for low, high in ranges for dim in range(low, high)] == [*range(len(shape))]
    for (low, high), (first, last) in spans:
        assert prod(source[low:high]) == prod(target[first:last])
    agreed = _boundaries(source) & _boundaries(target)
    assert {prod(source[:high]) for (_, high), _ in spans} | {1} == agreed


@given(pairs())
def test_common_factors_exist_where_each_boundary_divides_the_next(
    pair: tuple[Shape, Shape],
) -> None:
    """The definition, which the matcher follows in one walk."""
    boundaries = sorted(_boundaries(pair[0]) | _boundaries(pair[1]))
    steps = list(itertools.pairwise(boundaries))
    found = common_factors(*pair)
    if any(after % before for before, after in steps):
        assert found is None
        return
    assert found is not None
    assert found.sizes == [after // before for before, after in steps]
    for shape, dims in zip(pair, (found.source, found.target), strict=True):
        assert [prod(found.sizes[index] for index in dim) for dim in dims] == [*shape]
        assert [index for dim in dims for index in dim] == [*range(len(found.sizes))]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((6, 4), (2, 12), CommonFactors([2, 3, 4], [[0, 1], [2]], [[0], [1, 2]])),
        ((2, 1, 3), (6,), CommonFactors([2, 3], [[0], [], [1]], [[0, 1]])),
        ((6,), (1, 6), CommonFactors([6], [[0]], [[], [0]])),
        ((), (1, 1), CommonFactors([], [], [[], []])),
        ((4, 6), (6, 4), None),
        ((2, 3), (2,), None),  # elements left over
        ((2,), (2, 3), None),  # elements missing
    ],
)
def test_examples(source: Shape, target: Shape, expected: CommonFactors | None) -> None:
    assert common_factors(source, target) == expected
