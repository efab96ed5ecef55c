"""Bytes that a program saves for backward, in symbols that are derived from its graph."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.storage import Storage
from sp_compiler.cost.step_memory import StepMemory
from sp_compiler.cost.step_walk import SEED_BYTES
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.planning.formula.roles import MEANINGS, Role, find_roles
from sp_compiler.planning.formula.shapes import follow_shapes
from sp_compiler.planning.formula.sizes import Atom, Dim, divided, expression, size_of, unknowns

_WIDTHS = "hakdefcv"
_NO_ROLE = "n"
WORLD = sympy.Symbol("t", positive=True, integer=True)


@dataclass(frozen=True)
class Size:
    """Meaning and number of one symbol.

    Attributes:
        value: its number in this program.
        meaning: its meaning in words.
        equal_to: its expression in the formulas, if the numbers of this program allow: ``h/a`` for
            the width of a head, ``4*h`` for that of a feed-forward network.
        has_role: whether the role of the size is known, and with it the relation to other sizes.
    """

    value: int
    meaning: str
    equal_to: sympy.Expr | None = None
    has_role: bool = True


@dataclass(frozen=True)
class ActivationFormula:
    """Exact formulas of the bytes saved for backward on one rank, as expanded :mod:`sympy`
    expressions.

    Attributes:
        blocks: name of a distinct block to the bytes that each of its calls adds.
        tensors: name of a distinct block to the bytes of each tensor that it saves.
        total: bytes of the model.
        symbols: meaning of each symbol by name; symbols with ``equal_to`` do not occur in formulas.
        divided: sizes that are divisible by the number of ranks in this program; others are padded.
        batch_of_one: whether the example's batch is one, which may be confused with other sizes of
            1.
    """

    blocks: Mapping[str, sympy.Expr]
    tensors: Mapping[str, tuple[sympy.Expr, ...]]
    total: sympy.Expr
    symbols: Mapping[str, Size]
    divided: tuple[sympy.Expr, ...] = ()
    batch_of_one: bool = False

    def value(self, formula: sympy.Expr, **sizes: int) -> int:
        """Return the bytes of ``formula`` at the sizes of this program, except ``sizes``, by
        symbol.

        A symbol that is expressed through others follows them.

        Raises:
            ArgumentError: the formula does not determine the bytes at these sizes: an unknown
                symbol, or one that is expressed through others and gets another value; a missing
                size without a role when others change; sizes that are not divisible by the number
                of ranks; a batch of one that cannot be told from other sizes of 1 when sizes
                change.
        """
        values = {
            _symbol(name): sympy.Integer(sizes.get(name, size.value))
            for name, size in self.symbols.items()
        }
        for text in self._refusals(formula, sizes, values):
            raise ArgumentError(f"activation_formula.value: {text}")
        return int(formula.xreplace(values))

    def _refusals(
        self,
        formula: sympy.Expr,
        sizes: Mapping[str, int],
        values: Mapping[sympy.Symbol, sympy.Integer],
    ) -> Iterator[str]:
        """Return why the formula does not determine the bytes at ``sizes``."""
        for name, number in sizes.items():
            if name not in self.symbols:
                yield f"there is no {name}, only {', '.join(self.symbols)}"
                continue
            written = self.symbols[name].equal_to
            if written is not None and written.xreplace(values) != number:
                yield (
                    f"{name} is {self.symbols[name].value} like {written} in this plan, and "
                    f"written so: {name} = {number} needs a plan where they differ"
                )
        # At the sizes of the plan itself every formula is exact, whatever its symbols mean.
        if all(number == self.symbols[name].value for name, number in sizes.items()):
            return
        # A tensor has one batch: b**2 is b and a size of 1 beside it, as of one head on each rank.
        if self.batch_of_one and ("b" not in self.symbols or _degree(formula, _symbol("b")) > 1):
            yield (
                "the batch of this plan is one, and not told from other sizes of 1: other sizes "
                "need a plan whose example has a batch of two or more"
            )
        for name, size in self.symbols.items():
            if not size.has_role and name not in sizes and _symbol(name) in formula.free_symbols:
                yield (
                    f"{name} is {size.meaning}: give its value too, {name}={size.value} where it "
                    "stays as it is"
                )
        for expr in self.divided:
            # Only of what the formula is made of: another block's sizes are no matter here.
            if expr.free_symbols <= formula.free_symbols and expr.xreplace(values) % values[WORLD]:
                yield f"{expr} = {expr.xreplace(values)} is not divisible by t = {values[WORLD]}"

    def widths_only(self, formula: sympy.Expr) -> sympy.Expr:
        """Return ``formula`` without terms that contain no width: row statistics, seeds, single
        numbers.

        These are the terms that published formulas leave out: at most linear in the tokens, with
        none of the other sizes.
        """
        # Terms of degree 2 in s are scores of attention, which published formulas do have.
        tokens = {_symbol("b"), _symbol("s"), WORLD}
        terms = sympy.Add.make_args(sympy.expand(formula))
        degrees = [_degree(each, _symbol("s")) for each in terms]
        small = [
            term
            for term, degree in zip(terms, degrees, strict=True)
            if term.free_symbols <= tokens and degree < 2
        ]
        return sympy.Add(*terms) - sympy.Add(*small)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; formulas as text that ``sympy.sympify`` reads."""
        sizes = {
            name: {
                "value": size.value,
                "meaning": size.meaning,
                "equal_to": None if size.equal_to is None else str(size.equal_to),
                "has_role": size.has_role,
            }
            for name, size in self.symbols.items()
        }
        blocks = {name: str(tidy(formula)) for name, formula in self.blocks.items()}
        return {"blocks": blocks, "total": str(tidy(self.total)), "symbols": sizes}

    def __str__(self) -> str:
        lines = [f"{name}: {tidy(formula)}" for name, formula in self.blocks.items()]
        lines.append(f"whole model: {tidy(self.total)}")
        for name, size in self.symbols.items():
            written = "" if size.equal_to is None else f", written as {size.equal_to}"
            lines.append(f"  {name} = {size.value}: {size.meaning}{written}")
        return "\n".join(lines)


def tidy(formula: sympy.Expr) -> sympy.Expr:
    """Format for reading: common factors in front, protected from further simplification by
    sympy."""
    return sympy.factor_terms(sympy.expand(formula))


def _degree(formula: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr:
    """Return the degree, of 0 minus infinity."""
    # Padded tokens count as tokens.
    return sympy.degree(formula.replace(sympy.ceiling, lambda num_tokens: num_tokens), symbol)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


@dataclass(frozen=True)
class KeptStorage:
    """A storage at ``position`` of the saved tensors of a block's calls.

    ``shared``: see :class:`~sp_compiler.plan.KeptTensor`.
    """

    position: int
    storage: Storage
    shared: Literal["", "shared", "returned"]


def activation_formula(
    compiled: CompiledProgram, memory: StepMemory, kept: Mapping[str, Sequence[KeptStorage]]
) -> ActivationFormula:
    """Derive the formulas of the bytes that a step saves.

    Args:
        memory: memory of a step of ``compiled``.
        kept: saved storages by name of the block.
    """
    formulas = _Formulas(compiled, memory)
    tensors = {
        name: tuple(formulas.of(item.storage) for item in items) for name, items in kept.items()
    }
    blocks = {
        name: sympy.expand(
            sympy.Add(*(f for f, i in zip(tensors[name], items, strict=True) if not i.shared))
        )
        for name, items in kept.items()
    }
    total = sympy.expand(sympy.Add(*formulas.terms()))
    sizes = formulas.names.sizes(itertools.chain([total], *tensors.values()))
    formula = ActivationFormula(
        blocks, tensors, total, sizes, formulas.names.divided(), formulas.has_batch_of_one
    )
    # To the byte: a size that was named wrongly cannot stay unseen.
    assert formula.value(total) == memory.kept_bytes, total
    return formula


class _Formulas:
    """Formulas of the storages that ``compiled`` saves."""

    def __init__(self, compiled: CompiledProgram, memory: StepMemory) -> None:
        self.compiled, self.memory = compiled, memory
        self._shapes = follow_shapes(compiled)
        self.has_batch_of_one = self._shapes.has_batch_of_one
        self.names = Names(find_roles(compiled, self._shapes), compiled.world_size)
        self._known: dict[tuple[str, str], sympy.Expr] = {}

    def of(self, storage: Storage) -> sympy.Expr:
        """Return the bytes of ``storage``, which a forward allocated."""
        _, index, name = storage.owner
        region = self.compiled.program.calls[index].region.name
        # Calls of one region share their formulas: 80 layers are not derived one by one.
        if (region, name) not in self._known:
            self._known[region, name] = self._of(region, name)
        formula = self._known[region, name]
        assert self.names.value(formula) == storage.num_bytes, (storage, formula)
        return formula

    def _of(self, region: str, name: str) -> sympy.Expr:
        graph = self.compiled.regions[region].partitioned.forward
        (node,) = [node for node in graph.nodes if node.name == name]
        if node.op == "placeholder":  # the one input that is made for each call
            return sympy.Integer(SEED_BYTES)
        dims = self._shapes.of(region, name)
        sizes = (self.names.expression(dim) for dim in dims)
        return sympy.expand(sympy.Mul(node.meta["val"].element_size(), *sizes))

    def terms(self) -> list[sympy.Expr]:
        """Return each storage once, those of repeated blocks times the number of layers."""
        # By region and position: at one position all calls of a region keep the same, and only
        # their number multiplies it.
        counts: Counter[tuple[str, int]] = Counter()
        formulas: dict[tuple[str, int], sympy.Expr] = {}
        calls = self.compiled.program.calls
        keys = [(calls[item.call].region.name, item.position) for item in self.memory.kept]
        storages = {(key, item.storage) for key, item in zip(keys, self.memory.kept, strict=True)}
        shared = Counter(key for key, _ in storages)  # 1: all calls keep the same storage
        # What the model returns exists whether it is saved or not.
        seen = set(self.memory.returned)
        for key, item in zip(keys, self.memory.kept, strict=True):
            if item.storage in seen:
                continue
            seen.add(item.storage)
            counts[key] += 1
            formulas[key] = self.of(item.storage)
        num_calls = Counter(call.region.name for call in calls)
        return [
            (count if shared[key] == 1 else self.names.layers(key[0], num_calls[key[0]], count))
            * formulas[key]
            for key, count in counts.items()
        ]


class Names:
    """Symbols of the unknowns."""

    def __init__(self, roles: Sequence[Role], world_size: int) -> None:
        self._written: dict[Atom, sympy.Expr] = {}
        self._sizes: dict[str, Size] = {}
        self._regions: dict[str, sympy.Symbol] = {}
        self._divided: dict[sympy.Expr, None] = {}
        if world_size > 1:
            self._sizes["t"] = Size(world_size, "tensor-parallel ranks")
        # Roles come in the order of their letters: a width that is made of others finds their
        # names.
        for role in roles:
            self._name(role)
        self._relate()

    def expression(self, dim: Dim) -> sympy.Expr:
        for part in divided(dim):
            self._divided[self.expression(part)] = None
        equal = {_symbol(n): s.equal_to for n, s in self._sizes.items() if s.equal_to is not None}
        return expression(dim, self._atom, WORLD).xreplace(equal)

    def divided(self) -> tuple[sympy.Expr, ...]:
        """Sizes that ranks divide evenly."""
        return tuple(self._divided)

    def value(self, formula: sympy.Expr) -> int:
        values = {_symbol(name): sympy.Integer(size.value) for name, size in self._sizes.items()}
        return int(formula.xreplace(values))

    def sizes(self, formulas: Iterable[sympy.Expr]) -> dict[str, Size]:
        """Of the symbols in ``formulas``, and of those that were written otherwise."""
        used = {str(symbol) for formula in formulas for symbol in formula.free_symbols}
        return {
            name: size
            for name, size in self._sizes.items()
            if name in used or size.equal_to is not None
        }

    def layers(self, region: str, calls: int, count: int) -> sympy.Expr:
        """``count`` of a region's ``calls``, in terms of their number."""
        # All layers, or all but the first or last, is a number of layers; any other count is not.
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
        return _symbol(name)

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
        # Padded, or a square of the unknown: it cannot be solved for the unknown.
        if formula.has(sympy.ceiling) or sympy.diff(formula, dummy).has(dummy):
            return
        # The dim gets the letter, and the unknown in it is solved for: where a dim is 3*x and is
        # called f, x is f/3 from now on.
        symbol = self._new(role.letter, size_of(role.dim), MEANINGS[role.letter])
        factor = sympy.diff(formula, dummy)
        solution = (symbol - (formula - factor * dummy).expand()) / factor
        self._written[atom] = solution.xreplace(
            {other: self._atom(unknown[other]) for other in solution.free_symbols & set(unknown)}
        )

    def _relate(self) -> None:
        """Express widths through the hidden width if the numbers allow, as published formulas
        do."""
        hidden = self._sizes.get("h")
        for name, size in list(self._sizes.items()):
            letter, equal = name.rstrip("0123456789"), None
            first, heads = self._sizes[letter], self._sizes.get("a")
            # Each layer's weights are unknowns of their own: without this a model of equal layers
            # would have as many widths as weights.
            if name != letter and letter in _WIDTHS and size.value == first.value:
                equal = first.equal_to or _symbol(letter)
            elif hidden is None:
                continue
            # The width of a head, which papers write h/a.
            elif letter == "d" and heads is not None and size.value * heads.value == hidden.value:
                equal = _symbol("h") / _symbol("a")
            # Feed-forward widths are multiples of the hidden one by design, others by chance.
            elif letter == "f" and size.value % hidden.value == 0:
                equal = size.value // hidden.value * _symbol("h")
            if equal is not None:
                self._sizes[name] = Size(size.value, size.meaning, equal)

    def _atom(self, atom: Atom) -> sympy.Expr:
        if atom not in self._written:
            self._written[atom] = self._without_role(atom)
        return self._written[atom]

    def _without_role(self, atom: Atom) -> sympy.Expr:
        # A number that the model has for a size, half of a dim for one: written by that dim.
        if atom.hint is not None:
            hinted = expression(atom.hint.dim, self._atom, WORLD)
            return hinted / atom.hint.divided - atom.hint.less
        meaning = "a size without a role"
        if atom.in_doubt:
            meaning = "the batch, or 1 in every batch, which a batch of one does not tell"
        return self._new(_NO_ROLE, atom.value, meaning)
