"""Single mutations of the sources, drawn without looking at any test.

A mutation replaces one expression or statement by another that a slip of the hand could have made.
The source text around it stays byte for byte, so that a report shows the line as it would read.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
# What a mutation in them changes is a text, a type or a name: no number and no decision.
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One mutation of one file.

    Attributes:
        path: below the repository.
        line: number of the first changed line, from 1.
        start, end: characters of the file that are replaced.
        before, after: their text.
    """

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]

    def in_lines(self) -> Mutant:
        """The same, with as many lines around it as occur in the file once."""
        source = (ROOT / self.path).read_text(encoding="utf-8")
        begin = source.rfind("\n", 0, self.start) + 1
        end = source.find("\n", self.end)
        while source.count(source[begin:end]) > 1:
            begin = source.rfind("\n", 0, begin - 1) + 1
        after = source[begin : self.start] + self.after + source[self.end : end]
        return Mutant(self.path, self.line, begin, end, source[begin:end], after)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_one_line(self.before)}  ->  {_one_line(self.after)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def modules() -> list[Path]:
    """Every module of the infrastructure and of the passes, the link between them not followed."""
    found = [
        path
        for folder in ("sp_compiler", "passes")
        for path in (ROOT / folder).rglob("*.py")
        if "sp_compiler/passes" not in path.as_posix()
    ]
    return sorted(found)


def drawn(count: int, seed: int, paths: Sequence[Path]) -> list[Mutant]:
    """``count`` mutations in an order that the seed fixes, the same on every machine.

    Modules take turns, so that a small draw reaches all folders. The order is by a hash of the
    change and not of its position: lines that others insert above do not change the draw.
    """

    def rank(text: str) -> str:
        return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()

    piles = []
    for path in sorted(paths, key=lambda path: (rank(path.name), path)):
        pile = list(mutants(path))
        if pile:
            piles.append(sorted(pile, key=lambda m: rank(f"{m.path} {m.before} {m.after}")))
    turns = [pile[turn] for turn in range(count) for pile in piles if turn < len(pile)]
    return turns[:count]


def located(path: str, before: str, after: str) -> Mutant | None:
    """The mutation of the one place of a file that reads ``before``; ``None`` if it has gone."""
    source = (ROOT / path).read_text(encoding="utf-8")
    if source.count(before) != 1:
        return None
    start = source.index(before)
    line = source.count("\n", 0, start) + 1
    return Mutant(path, line, start, start + len(before), before, after)


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutation of one module."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = path.relative_to(ROOT).as_posix()
    for node, after in _changes(ast.parse(source)):
        # ``ast`` counts columns in bytes.
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        encoded = source.encode()
        before = encoded[begin:end].decode()
        begin, end = (len(encoded[:position].decode()) for position in (begin, end))
        yield Mutant(name, node.lineno, begin, end, before, after)


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes and the text that takes their place; annotations and docstrings have none."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _SKIPPED):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            for after in _replacements(node):
                yield node, after
        # Not of a loop, which would not end.
        if isinstance(node, ast.If) and not isinstance(node.test, ast.Compare | ast.BoolOp):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.comprehension):
            yield from ((condition, "True") for condition in node.ifs)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            pending += [child for child in children if isinstance(child, ast.AST)]


def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            yield _with(node, ops=[_SWAPPED[type(op)]()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Constant(value=float(value)):
            yield str(value * 2 if value else 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def _with(node: ast.expr, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"
