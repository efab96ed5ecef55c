"""Symbols of the sizes of a program, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from sp_compiler.planning.formula.roles import MEANINGS, Role
from sp_compiler.planning.formula.sizes import Atom, Dim, divided, expression, size_of, unknowns

_WIDTHS = "hakdefcv"
_NO_ROLE = "n"
DOUBTED = "the batch, or a dim of size 1, indistinguishable at a batch of one"
WORLD = sympy.Symbol("t", positive=True, integer=True)


def symbol_of(name: str) -> sympy.Symbol:
    """Return the symbol of a size: a positive integer, so that sympy can simplify."""
    return sympy.Symbol(name, positive=True, integer=True)


@dataclass(frozen=True)
class Size:
    """Meaning and value of one symbol.

    Attributes:
        value: its value in this program.
        meaning: its meaning in words.
        equal_to: its expression in the formulas, if the sizes of this program allow one: ``h/a``
            for the width of a head, ``4*h`` for that of a feed-forward network.
        has_role: whether the role of the size is known, and with it the relation to other sizes.
    """

    value: int
    meaning: str
    equal_to: sympy.Expr | None = None
    has_role: bool = True


class Names:
    """Symbols of the unknowns.

    Attributes:
        rewritten: names that some formula would contain if they were not expressed through others.
    """

    def __init__(self, roles: Sequence[Role], world_size: int) -> None:
        self.rewritten: set[str] = set()
        self._written: dict[Atom, sympy.Expr] = {}
        self._sizes: dict[str, Size] = {}
        self._regions: dict[str, sympy.Symbol] = {}
        self._divided: dict[sympy.Expr, None] = {}
        if world_size > 1:
            self._sizes["t"] = Size(world_size, "tensor-parallel ranks")
        # Roles come in the order of their letters, so that a width that is composed of others finds
        # their names.
        for role in roles:
            self._name(role)
        self._relate()

    def expression(self, dim: Dim) -> sympy.Expr:
        for part in divided(dim):
            self._divided[self.expression(part)] = None
        equal = {symbol_of(n): s.equal_to for n, s in self._sizes.items() if s.equal_to is not None}
        written = expression(dim, self._atom, WORLD)
        self.rewritten.update(str(symbol) for symbol in written.free_symbols if symbol in equal)
        return written.xreplace(equal)

    def divided(self) -> tuple[sympy.Expr, ...]:
        """Sizes that ranks divide evenly."""
        return tuple(self._divided)

    def value(self, formula: sympy.Expr) -> int:
        values = {symbol_of(name): sympy.Integer(size.value) for name, size in self._sizes.items()}
        return int(formula.xreplace(values))

    def sizes(self, formulas: Iterable[sympy.Expr]) -> dict[str, Size]:
        """Sizes of the symbols in ``formulas``, and of symbols expressed through others."""
        used = {str(symbol) for formula in formulas for symbol in formula.free_symbols}
        return {
            name: size
            for name, size in self._sizes.items()
            if name in used or (size.equal_to is not None and not self._repeats(name))
        }

    def _repeats(self, name: str) -> bool:
        """Return whether the first size of the same letter has the same expression, as widths of
        queries and of values do."""
        letter, equal = name.rstrip("0123456789"), self._sizes[name].equal_to
        return name != letter and equal == (self._sizes[letter].equal_to or symbol_of(letter))

    def layers(self, region: str, calls: int, count: int) -> sympy.Expr:
        """``count`` of a region's ``calls``, in terms of their number."""
        # All layers, or all except one, is expressed by the number of layers; other counts are not.
        if calls == 1 or calls - count > 1:
            return sympy.Integer(count)
        if region not in self._regions:
            meaning = f"layers, calls of {region}"
            self._regions[region] = self._new("L", calls, meaning)
        return self._regions[region] - (calls - count)

    def _new(self, letter: str, value: int, meaning: str) -> sympy.Symbol:
        taken = sum(name.rstrip("0123456789") == letter for name in self._sizes)
        # h, h2, h3, ...
        name = f"{letter}{taken + 1}" if taken else letter
        self._sizes[name] = Size(value, meaning, has_role=letter != _NO_ROLE)
        return symbol_of(name)

    def _name(self, role: Role) -> None:
        """Give a role its letter, unless it consists of named sizes."""
        unknown = {sympy.Dummy(positive=True, integer=True): atom for atom in unknowns(role.dim)}
        unknown = {dummy: atom for dummy, atom in unknown.items() if atom not in self._written}
        if not unknown:
            return
        dummies = {atom: dummy for dummy, atom in unknown.items()}
        formula = expression(
            role.dim, lambda atom: dummies.get(atom, self._written.get(atom)), WORLD
        )
        dummy, atom = next(iter(unknown.items()))
        # A padded size, or a square of the unknown, cannot be solved for the unknown.
        if formula.has(sympy.ceiling) or sympy.diff(formula, dummy).has(dummy):
            return
        # The dim gets the letter, and the unknown in it is solved for: if a dim is 3*x and is
        # called f, x is f/3 from now on.
        symbol = self._new(role.letter, size_of(role.dim), MEANINGS[role.letter])
        factor = sympy.diff(formula, dummy)
        solution = (symbol - (formula - factor * dummy).expand()) / factor
        self._written[atom] = solution.xreplace(
            {other: self._atom(unknown[other]) for other in solution.free_symbols & set(unknown)}
        )

    def _relate(self) -> None:
        """Express widths through the hidden width if their values allow it, as published formulas
        do."""
        hidden = self._sizes.get("h")
        for name, size in list(self._sizes.items()):
            letter, equal = name.rstrip("0123456789"), None
            first, heads = self._sizes[letter], self._sizes.get("a")
            # Each layer's weights are separate unknowns: without this a model of equal layers would
            # have one width per weight.
            if name != letter and letter in _WIDTHS and size.value == first.value:
                equal = first.equal_to or symbol_of(letter)
            elif hidden is None:
                continue
            # The width of a head, which papers write h/a.
            elif letter == "d" and heads is not None and size.value * heads.value == hidden.value:
                equal = symbol_of("h") / symbol_of("a")
            # Feed-forward widths are multiples of the hidden one by design, others by chance.
            elif letter == "f" and size.value % hidden.value == 0:
                equal = size.value // hidden.value * symbol_of("h")
            if equal is not None:
                self._sizes[name] = Size(size.value, size.meaning, equal)

    def _atom(self, atom: Atom) -> sympy.Expr:
        if atom not in self._written:
            self._written[atom] = self._without_role(atom)
        return self._written[atom]

    def _without_role(self, atom: Atom) -> sympy.Expr:
        if atom.is_counted:
            return sympy.Integer(atom.value)
        # A constant of the model, such as half of a dim, is expressed by that dim.
        if atom.hint is not None:
            hinted = expression(atom.hint.dim, self._atom, WORLD)
            return hinted / atom.hint.divided - atom.hint.less
        meaning = DOUBTED if atom.in_doubt else "a size without a role"
        return self._new(_NO_ROLE, atom.value, meaning)
