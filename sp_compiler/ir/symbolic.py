"""Open sizes: dims of the inputs as symbols, in graphs and in generated code.

Only this file uses PyTorch's symbolic shapes. A symbolic number occurs in a graph as an argument
(``torch.SymInt``), never as a node, so that passes see only operators on tensors. When a pass
compares such a number, the example's size decides, and the ``ShapeEnv`` records the comparison: the
program is valid for every call for which all comparisons have the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from sp_compiler.base.errors import SPCompilerError

Binding = Mapping[sympy.Symbol, int]
"""A size for every symbol."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class OpenSize:
    """One open dim: ``value`` is the size of dim ``dim`` of input leaf ``leaf``.

    Dims that are known to be equal share a ``name``.
    """

    symbol: sympy.Symbol
    value: torch.SymInt
    leaf: int
    dim: int
    name: str


@dataclass
class Sizes:
    """The open dims of one capture, and the sizes for which its program is valid.

    Attributes:
        env: the ``ShapeEnv`` that records comparisons.
        open: the open dims, one for each symbol of the capture.
        fixed: shapes of the tensor leaves of the example, ``None`` for an open dim.
        ties: other dims with the symbol of an open one: (leaf, dim, position in ``open``).
        proofs: facts computed at the example's sizes, recomputed for others.
    """

    env: ShapeEnv
    open: tuple[OpenSize, ...]
    fixed: tuple[tuple[int | None, ...] | None, ...]
    ties: tuple[tuple[int, int, int], ...] = ()
    proofs: list[Callable[[Binding], bool]] = field(default_factory=list)
    # The guards as one function, and how many there were when it was made.
    _guards: tuple[int, Callable[..., bool]] | None = None
    # Whether all proofs hold, by the sizes of the open dims.
    _proven: dict[tuple[int, ...], bool] = field(default_factory=dict)

    @property
    def distinct(self) -> list[OpenSize]:
        """The first open dim of each name."""
        # Reversed twice: a dict keeps the last value of equal keys, but the first dim is needed.
        return list({size.name: size for size in reversed(self.open)}.values())[::-1]

    @property
    def example(self) -> Binding:
        """The sizes of the example."""
        return {size.symbol: example_number(size.value) for size in self.open}

    def require_known(self) -> None:
        """Refuse comparisons that the sizes of a call cannot decide.

        Raises:
            NotSymbolic: one of them is not about dims of inputs.
        """
        # Comparisons of sizes without a value in the example, which torch defers to run time.
        if self.env.deferred_runtime_asserts:
            raise NotSymbolic("a size depends on the values in a tensor")
        for guard in self.env.guards:
            if not guard.expr.free_symbols <= {size.symbol for size in self.open}:
                raise NotSymbolic(f"{guard.expr} is not about dims of inputs")

    def rejection(self, leaves: Sequence[Any]) -> str | None:
        """Return why the program is invalid for these flattened inputs; ``None`` if it is valid."""
        # Cheapest first, since this runs in every call of the module: fixed sizes, guards, then
        # proofs, which are computed once for the same sizes.
        for leaf_value, shape in zip(leaves, self.fixed, strict=True):
            for dim, size in enumerate(shape or ()):
                if size is not None and leaf_value.shape[dim] != size:
                    return f"dim {dim} of an input is {leaf_value.shape[dim]}, not {size}"
        actual = tuple(int(leaves[size.leaf].shape[size.dim]) for size in self.open)
        for leaf, dim, position in self.ties:
            if leaves[leaf].shape[dim] != actual[position]:
                return f"dim {dim} of an input is not {self.open[position].name}"
        binding = {size.symbol: value for size, value in zip(self.open, actual, strict=True)}
        if not self._guards_hold(actual):
            return self._failed_guard(binding)
        # torch keeps ranges separately: a comparison with a constant may only narrow a range,
        # without a guard.
        for opened, value in zip(self.open, actual, strict=True):
            limits = self.env.var_to_range.get(opened.symbol)
            if limits is not None and not limits.lower <= value <= limits.upper:
                return f"{opened.name} is {value}, not in {limits.lower}..{limits.upper}"
        if actual not in self._proven:
            self._proven[actual] = all(proof(binding) for proof in self.proofs)
        return None if self._proven[actual] else "an attention mask is another one at these sizes"

    def _guards_hold(self, actual: Sequence[int]) -> bool:
        guards = self.env.guards
        # Compiled to one expression: evaluating sympy would take milliseconds in every call. It is
        # compiled again if later passes have added guards.
        if self._guards is None or self._guards[0] != len(guards):
            text = " and ".join(f"({_TEXT.doprint(guard.expr)})" for guard in guards) or "True"
            names = ", ".join(str(size.symbol) for size in self.open)
            # torch's printer prints a size divided by a float as a call of torch.
            given = {"math": math, "torch": torch}
            self._guards = len(guards), eval(f"lambda {names}: {text}", given)
        return bool(self._guards[1](*actual))

    def _failed_guard(self, binding: Binding) -> str:
        for guard in self.env.guards:
            if not guard.expr.xreplace(binding):
                frame = guard.sloc.framework_loc
                where = f" ({frame.filename}:{frame.lineno})" if hasattr(frame, "lineno") else ""
                named = guard.expr.xreplace({s.symbol: sympy.Symbol(s.name) for s in self.open})
                # Equal dims have one name, so a guard that they are equal becomes "true".
                what = "dims that were equal to stay so" if named is sympy.true else named
                return f"the model or its compilation requires {what}{where}"
        raise AssertionError("all guards hold")  # only called if a guard fails


_TEXT = PythonPrinter()


class NotSymbolic(SPCompilerError):
    """Sizes cannot stay open; the message says why."""


def open_sizes(placeholders: Mapping[int, Node], leaves: Sequence[Any], env: ShapeEnv) -> Sizes:
    """Return the open dims of an exported graph, given its input placeholders by leaf.

    Dims at the same position with the same size in the example are assumed to be equal.
    """
    env.frozen = False  # export froze it, but comparisons of passes must be recorded too
    first: dict[tuple[int, int], torch.SymInt] = {}
    dims: list[tuple[sympy.Symbol, torch.SymInt, int, int]] = []
    fixed: list[tuple[int | None, ...] | None] = []
    ties: list[tuple[int, int, int]] = []
    for leaf, example in enumerate(leaves):
        if not isinstance(example, Tensor):
            fixed.append(None)
            continue
        shape: list[int | None] = list(example.shape)
        node = placeholders.get(leaf)
        for dim, size in enumerate(node.meta["val"].shape if node is not None else ()):
            symbol = size.node._expr if isinstance(size, torch.SymInt) else None
            if not isinstance(symbol, sympy.Symbol):
                continue
            shape[dim] = None
            known = [other[0] for other in dims]
            if symbol in known:
                ties.append((leaf, dim, known.index(symbol)))
                continue
            # Batch and sequence dims of all inputs: few models accept different sizes, and every
            # comparison of two symbols would add a guard. Comparing them once unifies the symbols.
            other = first.setdefault((dim, int(example.shape[dim])), size)
            if other is not size:
                bool(size == other)
            dims.append((symbol, size, leaf, dim))
        fixed.append(tuple(shape))
    # By expression: it differs from the symbol of the capture if two were unified.
    names: dict[sympy.Expr, str] = {}
    inputs = {str(node.target) for node in placeholders.values()}
    for _, value, leaf, dim in dims:
        names.setdefault(value.node.expr, _name(leaves[leaf], dim, [*names.values()], inputs))
    opened = [
        OpenSize(symbol, value, leaf, dim, names[value.node.expr])
        for symbol, value, leaf, dim in dims
    ]
    return Sizes(env, tuple(opened), tuple(fixed), tuple(ties))


def _name(example: Tensor, dim: int, taken: Collection[str], inputs: Collection[str]) -> str:
    """Return ``b`` or ``s`` for sizes of token ids, ``size0``, ``size1`` and so on for others.

    It is not the name of an input, since both are arguments of the generated code.
    """
    is_ids = example.dim() == 2 and not example.is_floating_point()
    names = chain("bs"[dim] if is_ids else "", (f"size{n}" for n in count(len(taken))))
    return next(name for name in names if name not in taken and name not in inputs)


def inline_sizes(graph: Graph) -> None:
    """Replace nodes that compute symbolic numbers by the numbers, in their users' arguments.

    Numbers that depend on the values in a tensor stay nodes.
    """
    for node in list(graph.nodes):
        value = node.meta.get("val")
        # Read from a tensor: it has no value in the example, so it could not be compared later.
        if isinstance(value, SYMBOLIC) and not value.node.has_hint():
            continue
        if isinstance(value, (*SYMBOLIC, int, float)) and node.op == "call_function":
            for user in list(node.users):
                swap = lambda arg: value if arg is node else arg  # noqa: B023, E731
                user.args = map_arg(user.args, swap)
                user.kwargs = map_arg(user.kwargs, swap)
    # Backwards, so that the operands of an erased node may be erased, too.
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            value = node.meta.get("val")
            # A call without a result that takes numbers is export's assertion of a guard, which is
            # recorded anyway.
            numbers = pytree.tree_leaves(node.args) if value is None else [value]
            if any(isinstance(number, (*SYMBOLIC, bool, int, float)) for number in numbers):
                graph.erase_node(node)


def plain(value: Any) -> Any:
    """Return a symbolic number with a known value as a plain number; other values unchanged."""
    # ``node.expr`` applies replacements found since its creation; a SymInt itself never changes.
    if isinstance(value, SYMBOLIC):
        expr = value.node.expr
        if expr.is_number:
            return int(expr) if isinstance(value, torch.SymInt) else float(expr)
    return value


def example_number(value: Any) -> Any:
    """Return the example's value of a symbolic number, without a guard; other values unchanged."""
    if isinstance(value, SYMBOLIC):
        number = value.node.hint
        if number is None:
            raise NotSymbolic(f"{value} has no size in the example")
        return number
    return value


def example_numel(value: Tensor) -> int:
    """Return the number of elements of the example's tensor, without a guard."""
    return math.prod(map(example_number, value.shape))


def is_open(value: Any) -> bool:
    """Return whether ``value`` is a number that depends on the sizes of a call."""
    return isinstance(plain(value), SYMBOLIC)


def pin(value: Any) -> None:
    """Add guards that all sizes on which ``value`` depends are the example's."""
    if is_open(value):
        env = value.node.shape_env
        for symbol in sorted(value.node.expr.free_symbols, key=str):
            env.evaluate_expr(symbol, hint=env.backed_var_to_val[symbol])


def same_shape(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two shapes are equal for all open sizes, without a guard."""
    if len(first) != len(second):
        return False
    for one, other in zip(map(plain, first), map(plain, second), strict=True):
        if isinstance(one, SYMBOLIC) is not isinstance(other, SYMBOLIC):
            return False  # they may be equal in the example, but not at every size
        if not isinstance(one, SYMBOLIC):
            if one != other:
                return False
        # Expressions are compared first: torch's own proof uses sympy, which is slow.
        elif one.node.expr != other.node.expr and not statically_known_true(one == other):
            return False
    return True


def numbers_in(node: Node) -> Iterator[Any]:
    """Yield symbolic numbers among the arguments of ``node`` and in the shapes of its results."""
    for leaf in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val"))):
        if isinstance(leaf, Tensor):
            yield from (size for size in leaf.shape if isinstance(size, SYMBOLIC))
        elif isinstance(leaf, SYMBOLIC):
            yield leaf


def symbols_in(nodes: Iterable[Node]) -> set[sympy.Symbol]:
    """Return the symbols of all :func:`numbers_in`."""
    return {
        symbol for node in nodes for number in numbers_in(node)
        for symbol in number.node.expr.free_symbols
    }  # fmt: skip


def symbol_of(node: Node) -> sympy.Symbol | None:
    """Return the current symbol of a size placeholder; ``None`` for other nodes."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, SYMBOLIC):
        return None
    # Since the capture, symbols may have been unified or found to be constants.
    expr = value.node.expr
    return expr if isinstance(expr, sympy.Symbol) else None


def text(value: Any, names: Mapping[sympy.Symbol, str]) -> str:
    """Print a symbolic number as a Python expression of ``names``.

    Raises:
        NotSymbolic: the number depends on a symbol without a name.
    """
    expr = value.node.expr
    if missing := expr.free_symbols - set(names):
        unknown = ", ".join(sorted(map(str, missing)))
        raise NotSymbolic(f"{expr} depends on sizes that are not inputs: {unknown}")
    expr = expr.xreplace(
        {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.items()}
    )
    return _TEXT.doprint(expr)


def evaluate(value: Any, binding: Binding) -> Any:
    """Replace every symbolic number in ``value`` by its value at these sizes."""

    def number(leaf: Any) -> Any:
        if not isinstance(leaf, SYMBOLIC):
            return leaf
        result = leaf.node.expr.xreplace(binding)
        return float(result) if isinstance(leaf, torch.SymFloat) else int(result)

    return map_aggregate(value, number)


class SizedInterpreter(Interpreter):
    """Interpreter of graphs with open sizes, which it reads from the size placeholders.

    torch's own interpreter would pass symbols to operators on real tensors.
    """

    def run(self, *args: Any, **options: Any) -> Any:
        nodes = self.module.graph.find_nodes(op="placeholder")
        self._binding = {
            symbol: value
            for node, value in zip(nodes, args, strict=True)
            if (symbol := symbol_of(node)) is not None
        }
        return super().run(*args, **options)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self._binding:  # few graphs have open sizes, and this runs for every node
            args, kwargs = evaluate(args, self._binding), evaluate(kwargs, self._binding)
        return args, kwargs
