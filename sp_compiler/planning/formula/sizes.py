"""Sizes of dims as products of unknowns, which operators show to be equal.

A compiled program has concrete sizes. Two sizes are the same *unknown* only if an operator requires
it (both dims of a sum, the inner dims of a matmul), never because their values are equal.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import sympy


@dataclass(eq=False)
class Atom:
    """One factor of a size.

    Attributes:
        value: at the sizes of this program. A factor of 1 is one that could be larger: one sequence
            in a batch, or one rank's part if there is one head per rank.
        meaning: the factors that it was found to consist of; ``None`` for an unknown.
        hint: its expression if it stays unknown and without a name, because an operator has a
            constant for its size, such as half of a dim.
        in_doubt: a constant 1 in the graph of a program for a batch of one: either the batch, or a
            dim that is 1 for every batch and is broadcast.
        cut: the dim that it is a slice of, and where the slice begins.
        is_counted: whether the model selects each element by an index: the 3 of fused q, k and v.
    """

    value: int
    meaning: Meaning | None = None
    hint: Hint | None = None
    in_doubt: bool = False
    cut: tuple[Dim, int] | None = None
    is_counted: bool = False


Dim = tuple[Atom, ...]
"""Factors of the size of one dim, outermost first; empty where it can only be 1."""


@dataclass(frozen=True, eq=False)
class Product:
    """Factors of a size.

    ``share``: the rank's part that they replace. Ranks need not divide the first factor: 2 ranks
    share the tokens of 3 sequences of 8.
    """

    dim: Dim
    share: Share | None = None


@dataclass(frozen=True, eq=False)
class Sum:
    """Concatenated parts; the last may be padding."""

    parts: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of ``full``, rounded up where ``full`` is a sum that ends in padding.

    ``segments``: number of equal segments of ``full``, each divided among the ranks.
    """

    full: Dim
    world_size: int
    segments: int = 1


Meaning = Product | Sum | Share


@dataclass(frozen=True, eq=False)
class Hint:
    """``dim / divided - less``."""

    dim: Dim
    divided: int = 1
    less: int = 0


def unknown(size: int, hint: Hint | None = None) -> Dim:
    return (Atom(size, hint=hint),) if size != 1 else ()


def is_in_doubt(dim: Dim) -> bool:
    return any(atom.in_doubt for atom in resolved(dim))


def size_of(dim: Dim) -> int:
    return prod(atom.value for atom in dim)


def resolved(dim: Dim) -> Dim:
    """``dim`` in factors that are not products."""
    return tuple(itertools.chain.from_iterable(map(_factors, dim)))


def _factors(atom: Atom) -> Dim:
    if isinstance(atom.meaning, Product):
        return resolved(atom.meaning.dim)
    if isinstance(atom.meaning, Share):
        world_size, segments = atom.meaning.world_size, atom.meaning.segments
        factors = resolved(atom.meaning.full)
        sizes = [*itertools.accumulate((f.value for f in factors), operator.mul, initial=1)]
        # Ranks divide the outermost factor, or that of a segment if there are several.
        position = sizes.index(segments) if segments in sizes[:-1] else -1
        if len(factors) > 1 and position >= 0 and factors[position].value % world_size == 0:
            part = share((factors[position],), world_size)
            factors = (*factors[:position], *part, *factors[position + 1 :])
            atom.meaning = Product(factors, atom.meaning)
            return resolved(atom.meaning.dim)
    return (atom,)


def share(full: Dim, world_size: int, segments: int = 1) -> Dim:
    """One rank's part of a dim that is sharded."""
    return (Atom(-(-size_of(full) // world_size), Share(full, world_size, segments)),)


def gathered(dim: Dim, world_size: int, padding: int = 0) -> Dim:
    """The dim of which ``dim`` is one rank's part, ``padding`` smaller than all parts together."""
    factors = resolved(dim)
    if not factors:  # one element per rank
        return unknown(world_size)
    for position, atom in enumerate(factors):
        if isinstance(atom.meaning, Share):
            return (*factors[:position], *atom.meaning.full, *factors[position + 1 :])
    first, *rest = factors
    full = Atom(first.value * world_size - padding // size_of(tuple(rest)))
    if first.meaning is None:
        first.meaning = Share((full,), world_size)
    return (full, *rest)


def unify(left: Dim, right: Dim) -> None:
    """Record that two dims are the same; factors that cannot be aligned are unchanged."""
    for side, other in ((left, right), (right, left)):
        factors, parts = resolved(side), resolved(other)
        if len(factors) != 1 or not parts:
            continue
        (atom,) = factors
        # An atom that is part of its own factors stays unknown.
        if atom.meaning is None and not _depends(parts, atom):
            _equate(atom, parts)
            return
    lefts, rights = list(resolved(left)), list(resolved(right))
    while lefts and rights and _unify_inner(lefts, rights):
        pass


def _unify_inner(lefts: list[Atom], rights: list[Atom]) -> bool:
    """Remove the innermost factors of both and unify them; False if they cannot be aligned."""
    x, y = lefts.pop(), rights.pop()
    if x.value == y.value:
        # The next factor is the single element of a sharded dim: its partner is inside the other.
        if _is_single(lefts) and (parts := split_inner(y, y.value)):
            rights += parts[:-1]
            y = parts[-1]
        elif _is_single(rights) and (parts := split_inner(x, x.value)):
            lefts += parts[:-1]
            x = parts[-1]
        _merge(x, y)
    elif x.value == 1:
        rights.append(y)
    elif y.value == 1:
        lefts.append(x)
    elif x.value % y.value == 0 and (parts := split_inner(x, y.value)):
        lefts += parts
        rights.append(y)
    elif y.value % x.value == 0 and (parts := split_inner(y, x.value)):
        rights += parts
        lefts.append(x)
    else:
        return False
    return True


def _is_single(factors: Sequence[Atom]) -> bool:
    """Return whether the next factor is the only element that each rank has."""
    return bool(factors) and factors[-1].value == 1 and isinstance(factors[-1].meaning, Share)


def unknowns(dim: Dim) -> Dim:
    """Return the unknowns of which ``dim`` is ultimately composed."""
    atoms: list[Atom] = []
    for atom in resolved(dim):
        atoms += [atom] if atom.meaning is None else unknowns(_inside(atom))
    return tuple(dict.fromkeys(atoms))


def _merge(x: Atom, y: Atom) -> None:
    if x is y:
        return
    if x.meaning is None and not _depends((y,), x):
        _equate(x, (y,))
    elif y.meaning is None and not _depends((x,), y):
        _equate(y, (x,))
    elif isinstance(x.meaning, Share) and isinstance(y.meaning, Share):
        unify(x.meaning.full, y.meaning.full)
    elif isinstance(x.meaning, Sum) and isinstance(y.meaning, Sum):
        parts = x.meaning.parts, y.meaning.parts
        if [*map(size_of, parts[0])] == [*map(size_of, parts[1])]:
            for pair in zip(*parts, strict=True):
                unify(*pair)


def _equate(atom: Atom, dim: Dim) -> None:
    """Record what an unknown is; equal fractions imply that their dims are equal."""
    atom.meaning = Product(dim)
    (other, *rest) = dim
    if atom.hint is not None and not rest and other.meaning is None:
        if other.hint is None:
            other.hint = None if _depends(atom.hint.dim, other) else atom.hint
        elif other.hint.divided == atom.hint.divided and other.hint.less == atom.hint.less:
            unify(atom.hint.dim, other.hint.dim)
    # Kept with the unknown that represents both.
    other.is_counted |= atom.is_counted and not rest
    if atom.cut is not None and not rest and other.meaning is None and other.cut is None:
        other.cut = None if _depends(atom.cut[0], other) else atom.cut


def _depends(dim: Iterable[Atom], atom: Atom) -> bool:
    return any(part is atom or _depends(_inside(part), atom) for part in dim)


def _inside(atom: Atom) -> Dim:
    match atom.meaning:
        case Product(dim, _) | Share(dim, _):
            return dim
        case Sum(parts):
            return tuple(itertools.chain.from_iterable(parts))
        case None:
            return atom.hint.dim if atom.hint else ()


def split_inner(atom: Atom, inner: int) -> Dim:
    """Split a factor in two, the inner one of size ``inner``; () if that is impossible."""
    if atom.meaning is None and atom.value > inner:
        atom.meaning = Product((Atom(atom.value // inner), Atom(inner)))
        return resolved((atom,))
    if isinstance(atom.meaning, Share) and atom.meaning.segments == 1:
        cut = cut_inner(atom.meaning.full, inner)
        if cut is not None:
            atom.meaning = Product((*share(cut[0], atom.meaning.world_size), *cut[1]))
            return resolved((atom,))
    return ()


def cut_inner(dim: Dim, size: int) -> tuple[Dim, Dim] | None:
    """(outer, inner) factors of ``dim``, the inner ones of ``size`` together."""
    rest, inner = list(resolved(dim)), list[Atom]()
    # A new dim of size 1 is the innermost factor of 1, if there is one.
    if size == 1 and rest and rest[-1].value == 1:
        inner.insert(0, rest.pop())
    while size > 1:
        if not rest:
            return None
        atom = rest.pop()
        if size % atom.value:
            if atom.value % size or not (parts := split_inner(atom, size)):
                return None
            rest += parts
            continue
        inner.insert(0, atom)
        size //= atom.value
    return tuple(rest), tuple(inner)


def parts_of(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """Dims of the parts that ``dim`` is split into."""
    if len(sizes) == 1:
        return [dim]
    factors = resolved(dim)
    if len(factors) == 1:
        (atom,) = factors
        if isinstance(atom.meaning, Share):
            world_size = atom.meaning.world_size
            full = parts_of(atom.meaning.full, [size * world_size for size in sizes])
            return [share(part, world_size) for part in full]
        if atom.meaning is None:
            atom.meaning = Sum(tuple(map(unknown, sizes)))
        if isinstance(atom.meaning, Sum) and [*map(size_of, atom.meaning.parts)] == [*sizes]:
            return list(atom.meaning.parts)
    equal = len(set(sizes)) == 1
    return [unknown(size, Hint(dim, len(sizes)) if equal else None) for size in sizes]


def joined(parts: Sequence[Dim]) -> Dim:
    """The dim that is the concatenation of ``parts``."""
    if len(parts) == 1:
        return parts[0]
    # All slices of a dim together are that dim, which may have factors.
    return _cut_from(parts) or (Atom(sum(map(size_of, parts)), Sum(tuple(parts))),)


def uncut(dim: Dim) -> Dim:
    """Return the dim that ``dim`` is a slice of, or itself."""
    cut = _cut_of(dim)
    return dim if cut is None else cut[0]


def _cut_from(parts: Sequence[Dim]) -> Dim | None:
    """The dim of which ``parts`` are all slices, in order, as with chunks; ``None`` if there is
    none."""
    source: Dim | None = None
    position = 0
    for part in parts:
        cut = _cut_of(part)
        if cut is None or cut[1] != position or resolved(source or cut[0]) != resolved(cut[0]):
            return None
        source = cut[0]
        position += size_of(part)
    return source if source is not None and position == size_of(source) else None


def _cut_of(dim: Dim) -> tuple[Dim, int] | None:
    # Before it is resolved: a slice may be unified with another dim (part of a head with a table).
    while len(dim) == 1 and dim[0].cut is None and isinstance(dim[0].meaning, Product):
        dim = dim[0].meaning.dim
    return dim[0].cut if len(dim) == 1 else None


def sliced(dim: Dim, start: int, size: int) -> Dim:
    """A slice of a dim: some parts of a sum, otherwise an unknown, if possible with a fraction as
    its hint."""
    if size == size_of(dim):
        return dim
    (first, *rest) = resolved(dim)
    if not rest and isinstance(first.meaning, Sum):
        parts = first.meaning.parts
        ends = [0, *itertools.accumulate(map(size_of, parts))]
        if start in ends and start + size in ends:
            return joined(parts[ends.index(start) : ends.index(start + size)])
    hint = None
    if size_of(dim) - size == 1:
        hint = Hint(dim, less=1)
    elif size_of(dim) % size == 0:
        hint = Hint(dim, size_of(dim) // size)
    part = unknown(size, hint)
    for atom in part:
        atom.cut = dim, start
    return part


Symbols = Callable[[Atom], sympy.Expr]


def expression(dim: Dim, symbol: Symbols, world_size: sympy.Expr) -> sympy.Expr:
    """``dim`` in symbols; ``symbol`` returns the symbol of an unknown."""
    return sympy.Mul(*(_atom_expression(atom, symbol, world_size) for atom in resolved(dim)))


def _atom_expression(atom: Atom, symbol: Symbols, world_size: sympy.Expr) -> sympy.Expr:
    match atom.meaning:
        case Sum(parts):
            return sympy.Add(*(expression(part, symbol, world_size) for part in parts))
        case Share(full, ranks):
            rows = _without_padding(full, ranks)
            if rows is not None:
                return sympy.ceiling(expression(rows, symbol, world_size) / world_size)
            part = expression(full, symbol, world_size) / world_size
            return sympy.ceiling(part) if size_of(full) % ranks else part
        case _:
            return symbol(atom)


def divided(dim: Dim) -> list[Dim]:
    """Return the dims that :func:`expression` assumes to be divisible by the number of ranks."""
    result: list[Dim] = []
    resolved(dim)  # replaces shares by products where possible
    for atom in dim:
        meaning = atom.meaning
        if isinstance(meaning, Product) and meaning.share is not None:
            meaning = meaning.share
        if isinstance(meaning, Share):
            rounded = _without_padding(meaning.full, meaning.world_size) is not None
            if not rounded and size_of(meaning.full) % meaning.world_size == 0:
                result.append(meaning.full)
            result += divided(meaning.full)
        elif meaning is not None:
            result += divided(_inside(atom))
    return result


def _without_padding(full: Dim, ranks: int) -> Dim | None:
    """Return the part of ``full`` that was padded to a multiple of ``ranks``."""
    factors = resolved(full)
    if len(factors) != 1 or not isinstance(factors[0].meaning, Sum):
        return None
    *rows, padding = factors[0].meaning.parts
    count = sum(map(size_of, rows))
    return joined(rows) if size_of(padding) == -count % ranks else None
