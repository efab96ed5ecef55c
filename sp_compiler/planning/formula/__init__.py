"""Bytes that a program saves for backward, in symbols that are derived from its graph.

Alternatively, formulas could be fitted to the bytes that plans at other sizes save. That would need
no code that follows shapes through operators, but at least one plan for each term, 4 to 13 of them,
and a guess of the terms: 5 to 93 s of CPU time for a GPT, a Llama, a T5 and a BERT of two layers.
Deriving them takes 0.01 to 0.06 s (``python -m benchmarks.solver_ways formula``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.storage import Storage
from sp_compiler.cost.step_memory import StepMemory
from sp_compiler.cost.step_walk import SEED_BYTES
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.planning.formula.names import DOUBTED, WORLD, Names, Size, symbol_of
from sp_compiler.planning.formula.roles import find_roles
from sp_compiler.planning.formula.shapes import follow_shapes


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
        rewritten: symbols with ``equal_to`` whose sizes occur in the saved tensors.
        batch_of_one: whether the example's batch is one, which may be indistinguishable from other
            sizes of 1.
    """

    blocks: Mapping[str, sympy.Expr]
    tensors: Mapping[str, tuple[sympy.Expr, ...]]
    total: sympy.Expr
    symbols: Mapping[str, Size]
    divided: tuple[sympy.Expr, ...] = ()
    batch_of_one: bool = False
    rewritten: frozenset[str] = frozenset()

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
            symbol_of(name): sympy.Integer(sizes.get(name, size.value))
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
        """Return the reasons why the formula does not determine the bytes at ``sizes``."""
        for name, number in sizes.items():
            if name not in self.symbols:
                yield f"there is no {name}, only {', '.join(self.symbols)}"
                continue
            written = self.symbols[name].equal_to
            if written is not None and written.xreplace(values) != number:
                yield (
                    f"{name} is {self.symbols[name].value} like {written} in this plan, and "
                    f"written as such: {name} = {number} needs a plan in which they differ"
                )
        # At the sizes of the plan itself every formula is exact, whatever its symbols mean.
        if all(number == self.symbols[name].value for name, number in sizes.items()):
            return
        if not self._tells_batch_in(formula):
            yield (
                "the batch of this plan is 1, and its formulas cannot tell it from other sizes of "
                "1: for other sizes make a plan with a batch of two or more"
            )
        for name, size in self.symbols.items():
            if not size.has_role and name not in sizes and symbol_of(name) in formula.free_symbols:
                yield (
                    f"{name} is {size.meaning}: pass its value too, {name}={size.value} if it "
                    "does not change"
                )
        for expr in self.divided:
            # Only sizes that occur in the formula: those of other blocks do not matter.
            if expr.free_symbols <= formula.free_symbols and expr.xreplace(values) % values[WORLD]:
                yield f"{expr} = {expr.xreplace(values)} is not divisible by t = {values[WORLD]}"

    @property
    def tells_batch(self) -> bool:
        """Return whether all formulas distinguish a batch of one from other sizes of 1."""
        doubted = any(size.meaning == DOUBTED for size in self.symbols.values())
        formulas = (self.total, *self.blocks.values(), *itertools.chain(*self.tensors.values()))
        return not doubted and all(map(self._tells_batch_in, formulas))

    def _tells_batch_in(self, formula: sympy.Expr) -> bool:
        # A tensor has one batch dim: b**2 is b times another size of 1, such as one head per rank.
        is_known = "b" in self.symbols and _degree(formula, symbol_of("b")) <= 1
        return is_known or not self.batch_of_one

    def at_batch_of_one(self, batch: int) -> ActivationFormula | None:
        """Return the same formulas for a plan of one sequence; ``None`` if b is not ``batch``."""
        known = self.symbols.get("b")
        if known is None or known.value != batch:
            return None
        return replace(self, symbols={**self.symbols, "b": replace(known, value=1)})

    def same_bytes(self, other: ActivationFormula) -> bool:
        """Return whether ``other`` has the same sizes, and the same bytes for each tensor, each
        block and in total."""
        return self._bytes() == other._bytes()

    def _bytes(self) -> dict[str, Any]:
        values = {symbol_of(name): size.value for name, size in self.symbols.items()}
        groups = {"": (self.total,), **self.tensors}
        of_tensors = {
            name: [formula.xreplace(values) for formula in formulas]
            for name, formulas in groups.items()
        }
        of_blocks = {name: formula.xreplace(values) for name, formula in self.blocks.items()}
        return {"tensors": of_tensors, "blocks": of_blocks}

    def widths_only(self, formula: sympy.Expr) -> sympy.Expr:
        """Return ``formula`` without terms that contain no width: row statistics, seeds, single
        numbers.

        These are the terms that published formulas leave out: at most linear in the tokens, with
        none of the other sizes.
        """
        # Terms of degree 2 in s are attention scores, which published formulas include.
        tokens = {symbol_of("b"), symbol_of("s"), WORLD}
        terms = sympy.Add.make_args(sympy.expand(formula))
        degrees = [_degree(each, symbol_of("s")) for each in terms]
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
        shown = {str(x) for each in (self.total, *self.blocks.values()) for x in each.free_symbols}
        # Tensors that are not counted, such as returned logits, may contain more symbols.
        for name, size in self.symbols.items():
            if name not in shown and name not in self.rewritten:
                continue
            written = "" if size.equal_to is None else f", written as {size.equal_to}"
            lines.append(f"  {name} = {size.value}: {size.meaning}{written}")
        return "\n".join(lines)


def tidy(formula: sympy.Expr) -> sympy.Expr:
    """Format for reading: common factors in front, protected from further simplification by
    sympy."""
    return sympy.factor_terms(sympy.expand(formula))


def _degree(formula: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr:
    """Return the degree; minus infinity for 0."""
    # Padded tokens count as tokens.
    return sympy.degree(formula.replace(sympy.ceiling, lambda num_tokens: num_tokens), symbol)


@dataclass(frozen=True)
class KeptStorage:
    """A storage at ``position`` of the saved tensors of a block's calls.

    ``shared``: see :class:`~sp_compiler.planning.data.KeptTensor`.
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
        blocks,
        tensors,
        total,
        sizes,
        formulas.names.divided(),
        formulas.has_batch_of_one,
        frozenset(formulas.names.rewritten),
    )
    # Exact, so that a size with a wrong name does not go unnoticed.
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
        # Calls of one region share their formulas, so that 80 layers are derived once.
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
        # By region and position: at one position all calls of a region keep the same size, which is
        # multiplied by their number.
        counts: Counter[tuple[str, int]] = Counter()
        formulas: dict[tuple[str, int], sympy.Expr] = {}
        calls = self.compiled.program.calls
        keys = [(calls[item.call].region.name, item.position) for item in self.memory.kept]
        storages = {(key, item.storage) for key, item in zip(keys, self.memory.kept, strict=True)}
        shared = Counter(key for key, _ in storages)  # 1: all calls keep the same storage
        # The model's outputs exist whether they are saved or not.
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
