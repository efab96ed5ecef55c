"""Sizes as products of unknowns: what views, shards and slices tell about them."""

from __future__ import annotations

import sympy

from sp_compiler.planning.formula.reshapes import reshaped
from sp_compiler.planning.formula.sizes import (
    Atom,
    expression,
    gathered,
    joined,
    parts_of,
    share,
    size_of,
    sliced,
    unify,
    unknown,
)


class _Letters:
    """Names for unknowns in order of appearance."""

    def __init__(self) -> None:
        self.known: dict[Atom, sympy.Symbol] = {}

    def __call__(self, dim: tuple[Atom, ...]) -> str:
        def symbol(atom: Atom) -> sympy.Symbol:
            return self.known.setdefault(atom, sympy.Symbol("uvwxyz"[len(self.known)]))

        return str(expression(dim, symbol, sympy.Symbol("t")))


def test_equal_numbers_are_not_the_same_size() -> None:
    text = _Letters()
    left, right = unknown(8), unknown(8)
    assert (text(left), text(right)) == ("u", "v")
    unify(left, right)
    assert text(left) == text(right)


def test_a_view_finds_factors_and_equality_spreads_them() -> None:
    """(bs, h) -> (b, s, a, d): h is a*d wherever it occurs."""
    text = _Letters()
    rows, hidden = unknown(24), unknown(32)
    b, s, a, d = reshaped([rows, hidden], (2, 12, 4, 8))
    assert [text(dim) for dim in (b, s, a, d)] == ["u", "v", "w", "x"]
    assert (text(rows), text(hidden)) == ("u*v", "w*x")
    other = unknown(32)
    unify(other, hidden)
    assert text(other) == "w*x"


def test_a_view_that_cuts_across_factors_makes_unknowns() -> None:
    dims = [unknown(6), unknown(4)]
    unify(dims[0], joined([unknown(5), unknown(1)]))  # a sum has no factors
    first, second = reshaped(dims, (8, 3))
    assert (size_of(first), size_of(second)) == (8, 3)


def test_ranks_divide_the_outer_factor() -> None:
    text = _Letters()
    whole = unknown(32)
    heads, width = reshaped([share(whole, 2)], (2, 8))
    assert (text(heads), text(width), text(whole)) == ("u/t", "v", "u*v")
    assert text(gathered(heads, 2)) == "u"


def test_one_head_a_rank_is_a_size() -> None:
    text = _Letters()
    heads, width = reshaped([share(unknown(32), 4)], (1, 8))
    assert (text(heads), size_of(heads)) == ("u/t", 1)
    assert text(reshaped([heads, width], (8,))[0]) == "u*v/t"


def test_ranks_divide_each_segment() -> None:
    text = _Letters()
    heads, width = reshaped([share(unknown(32), 8, 4)], (4, 1))
    assert (text(heads), text(width)) == ("u", "v/t")


def test_parts_and_what_they_make_together() -> None:
    text = _Letters()
    whole = unknown(96)
    parts = parts_of(share(whole, 2), (16, 16, 16))
    assert [text(part) for part in parts] == ["u/t", "v/t", "w/t"]
    assert text(whole) == "u + v + w"
    assert text(sliced(whole, 32, 64)) == "v + w"


def test_slices_make_their_dim_again() -> None:
    """Also where one of them was found to be as long as a table: a part of each head is rotated."""
    text = _Letters()
    head, frequencies = unknown(16), unknown(4)
    assert text(head) == "u"
    rotated, rest = sliced(head, 0, 8), sliced(head, 8, 8)
    unify(rotated, joined([frequencies, frequencies]))
    assert text(rotated) == "2*v"
    assert text(joined([rotated, rest])) == "u"
    assert text(joined([rest, rotated])) != "u"


def test_padded_rows_are_rounded_up() -> None:
    text = _Letters()
    rows = (*unknown(3), *unknown(11))
    assert text(share(joined([rows, unknown(3)]), 4)) == "ceiling(u*v/t)"
    assert text(share((*unknown(3), *unknown(12)), 4)) == "w*x/t"
