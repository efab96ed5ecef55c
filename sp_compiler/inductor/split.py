"""Split generated functions into parts that Inductor compiles and parts that run uncompiled.

::

    def forward(tp, x, w):                       @inductor
        y = torch.relu(x) * 2                    def forward_1(tp, x):
        y_gathered = tp.all_gather(y, ...)  ->       y = torch.relu(x) * 2
        z = torch.mm(y_gathered, w)                  return y
        saved = (y, w)
        return (z,), saved                       def forward(tp, x, w):
                                                     y = Block.forward_1(tp, x)
                                                     y_gathered = tp.all_gather(y, ...)
                                                     z = torch.mm(y_gathered, w)
                                                     saved = (y, w)
                                                     return (z,), saved

Order, names and comments of the statements do not change: starts and waits of collectives stay
where the schedule has put them, and recomputation stays just before its use.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sp_compiler.base.python_text import Wrapped
from sp_compiler.ops.registry import OPERATORS

DECORATOR = "inductor"
IMPORT = f"from sp_compiler.inductor.fused import {DECORATOR}"
# Methods of the communicator that are not custom operators and do not communicate.
_LOCAL_METHODS = frozenset({"shard", "zero_pad_to_partial"})
# Library kernels. A missing name costs a compilation that gains nothing, and a superfluous one
# leaves an operator unfused; neither changes results.
# fmt: off
_PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "add_product",
    "scaled_dot_product_attention",
})
# Calls that give Inductor nothing to fuse; the same holds for names that are wrong here.
_NOT_FUSED = _PRODUCTS | frozenset({
    "reshape", "view", "view_as", "flatten", "unflatten", "transpose", "permute", "movedim",
    "t", "unsqueeze", "squeeze", "expand", "expand_as", "split", "chunk", "unbind", "narrow",
    "select", "contiguous", "detach",
})
# fmt: on
# Operators that generated code writes as symbols.
_SYMBOLS = (ast.BinOp, ast.Compare)
# For a single operator, Inductor would run the same kernel, with one more call.
_LEAST_OPERATORS = 2


@dataclass
class _Statement:
    """One statement and its lines, with the comments and blank lines above it."""

    node: ast.stmt
    lines: list[str]

    def names(self, context: type[ast.expr_context]) -> list[str]:
        """Names that it reads, writes or deletes, in order, each once."""
        nodes = [each for each in ast.walk(self.node) if isinstance(each, ast.Name)]
        nodes.sort(key=lambda each: (each.lineno, each.col_offset))
        return list(dict.fromkeys(each.id for each in nodes if isinstance(each.ctx, context)))


@dataclass
class _Run:
    """Consecutive statements; ``compiled``: as a separate function."""

    compiled: bool
    statements: list[_Statement] = field(default_factory=list)

    def reads(self) -> list[str]:
        """Names that must be passed in, in order of first use."""
        own: set[str] = set()
        needed: dict[str, None] = {}
        for statement in self.statements:
            needed.update((name, None) for name in statement.names(ast.Load) if name not in own)
            own.update(statement.names(ast.Store))
        return list(needed)

    def writes(self) -> list[str]:
        """Names that are assigned, in order of assignment."""
        written: dict[str, None] = {}
        for statement in self.statements:
            written.update(dict.fromkeys(statement.names(ast.Store)))
            for name in statement.names(ast.Del):
                written.pop(name, None)
        return list(written)


def split_method(
    class_name: str,
    source: str,
    wrapped: Wrapped,
    open_sizes: Sequence[str] = (),
    products: bool = True,
) -> list[str]:
    """Cut the text of one static method into the functions to compile and the method itself.

    Each function also gets the ``open_sizes`` of inputs that the method knows. Without
    ``products``, a statement with a matmul stays in the method unchanged.
    """
    lines = source.splitlines()
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    # The signature may take several lines: it ends with the last colon before the body.
    start = next(at for at in range(function.body[0].lineno - 2, 0, -1) if lines[at][-2:] == "):")
    head = lines[: start + 1]
    runs = _runs(_statements(function.body, lines, start + 1), products)
    functions: list[str] = []
    body: list[str] = []
    known = {argument.arg for argument in function.args.args}
    for place, run in enumerate(runs):
        if not run.compiled:
            for statement in run.statements:
                body += _in_method(statement, known)
                known.update(statement.names(ast.Store))
            continue
        # Inductor needs the value of each size that the shape of an argument is computed from.
        read = dict.fromkeys([*run.reads(), *open_sizes])
        inputs = [name for name in read if name in known and name != "tp"]
        results = _read_behind(runs[place + 1 :], run.writes())
        if not results:
            continue
        name = f"{function.name}_{len(functions) + 1}"
        functions.append(_function(name, inputs, results, run, wrapped))
        call = f"{', '.join(results)} = {class_name}.{name}("
        lines_of_call = wrapped(call, ["tp", *inputs], ")")
        # If a section begins with the run, the blank line before it stays.
        body += [*([""] if body and not run.statements[0].lines[0] else []), *lines_of_call]
        known.update(results)
        # A rebound name no longer holds its old value.
        dead = [name for each in run.statements for name in each.names(ast.Del)]
        dead = [name for name in dict.fromkeys(dead) if name in inputs and name not in results]
        body += [f"del {', '.join(dead)}"] if dead else []
        known.difference_update(dead)
    return [*functions, "\n".join([*head, *textwrap.indent("\n".join(body), "    ").splitlines()])]


def _statements(
    nodes: Sequence[ast.stmt], lines: Sequence[str], start: int
) -> Iterator[_Statement]:
    """Yield statements with their unindented lines; those of the first begin at ``start``."""
    for node in nodes:
        end = node.end_lineno or node.lineno
        yield _Statement(node, [line.removeprefix("    ") for line in lines[start:end]])
        start = end


def _runs(statements: Iterable[_Statement], products: bool) -> list[_Run]:
    """Group ``statements`` into runs that stay and runs that are compiled."""
    runs: list[_Run] = []
    for statement in statements:
        deletes = isinstance(statement.node, ast.Delete)
        compiled = runs[-1].compiled if deletes and runs else _is_compiled(statement.node, products)
        if not runs or runs[-1].compiled is not compiled:
            runs.append(_Run(compiled))
        runs[-1].statements.append(statement)
    for run in runs:
        operators = sum(1 for each in run.statements for _ in _operators(each.node))
        run.compiled &= operators >= _LEAST_OPERATORS
    return runs


def _is_compiled(node: ast.stmt, products: bool) -> bool:
    """Return whether ``node`` computes something from only this rank's tensors."""
    if not isinstance(node, ast.Assign):
        return False
    calls = [each for each in ast.walk(node.value) if isinstance(each, ast.Call)]
    computes = calls or any(isinstance(each, _SYMBOLS) for each in ast.walk(node.value))
    if not products and any(_name(call) in _PRODUCTS for call in calls):
        return False
    return bool(computes) and not any(map(_stays, calls))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _stays(call: ast.Call) -> bool:
    """Return whether ``call`` starts or waits for a collective, reads values on the host, or is
    compiled separately."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "wait":
        return True
    owner = call.func.value
    if not isinstance(owner, ast.Name) or owner.id != "tp" or call.func.attr in _LOCAL_METHODS:
        return False
    ours = OPERATORS.get(call.func.attr)
    return ours is None or ours.collectives is not None or ours.runs_apart


def _operators(node: ast.stmt) -> Iterator[ast.expr]:
    """Return the operators that Inductor may fuse."""
    for each in ast.walk(node):
        if isinstance(each, _SYMBOLS):
            yield each
        elif isinstance(each, ast.Call):
            function = each.func
            if _name(each) not in _NOT_FUSED:
                yield each
            # Counted twice: our kernel is a chain of operators, which eager code runs one by one.
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "tp":
                yield each


def _read_behind(runs: Iterable[_Run], names: Sequence[str]) -> list[str]:
    """Return the ``names`` whose values later ``runs`` read."""
    read: set[str] = set()
    gone: set[str] = set()
    for statement in (each for run in runs for each in run.statements):
        read.update(name for name in statement.names(ast.Load) if name not in gone)
        gone.update(statement.names(ast.Store))
    return [name for name in names if name in read]


def _in_method(statement: _Statement, known: set[str]) -> list[str]:
    """Return the lines of a statement that stays; a deletion keeps only names in ``known``."""
    if not isinstance(statement.node, ast.Delete):
        return statement.lines
    dead = [name for name in statement.names(ast.Del) if name in known]
    known.difference_update(dead)
    return [f"del {', '.join(dead)}"] if dead else []


def _function(
    name: str, inputs: Sequence[str], results: Sequence[str], run: _Run, wrapped: Wrapped
) -> str:
    body: list[str] = []
    for statement in run.statements:
        # Inductor decides when to free a buffer; the caller keeps the arguments alive.
        if not isinstance(statement.node, ast.Delete):
            body += statement.lines
    body = (
        textwrap.indent("\n".join([*body, "", f"return {', '.join(results)}"]), "    ")
        .lstrip("\n")
        .splitlines()
    )
    return "\n".join(
        ["@staticmethod", f"@{DECORATOR}", *wrapped(f"def {name}(", ["tp", *inputs], "):"), *body]
    )
