"""Graphs of generated code, read from its text: one per function, to be compared like any other."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.inductor.split import IMPORT

_OPERATORS: dict[type[ast.AST], Any] = {
    getattr(ast, name): getattr(operator, function)
    for name, function in (
        *(("Add", "add"), ("Sub", "sub"), ("Mult", "mul"), ("Div", "truediv"), ("Mod", "mod")),
        *(("FloorDiv", "floordiv"), ("Pow", "pow"), ("MatMult", "matmul"), ("USub", "neg")),
        *(("BitAnd", "and_"), ("BitOr", "or_"), ("Invert", "invert")),
    )
}
# What generated code begins with.
_IMPORTS = {
    "import math",
    "import torch",
    "import torch.nn.functional as F",
    IMPORT,
}


def code_graphs(source: str) -> dict[str, Graph]:
    """Return the graph of each function of ``source``: by ``"Class.function"`` in a class, by its
    name outside, where an edit may put functions that others call.

    Whatever else an edit may put there, such as other imports or the attributes of a class, are
    nodes of the graphs ``"(module)"`` and ``"Class.(class)"``. Nothing is executed. Values have the
    names of the text, and no shapes.

    Raises:
        ArgumentError: the text is not Python, or has no functions.
    """
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise ArgumentError(f"generated code, line {error.lineno}: {error.msg}") from error
    aliases = dict(_aliases(module))
    graphs = {name: _Function(aliases).read(each) for name, each in _functions(module)}
    if not graphs:
        raise ArgumentError(
            f"cannot compare the text {source[:40]!r}: expected generated code, such as module.code"
        )
    others = {name: _Function(aliases).read_others(parts) for name, parts in _others(module)}
    return graphs | {name: graph for name, graph in others.items() if len(graph.nodes)}


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions, with the names of their graphs."""
    for each in module.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name, each
        elif isinstance(each, ast.ClassDef):
            functions = (part for part in each.body if isinstance(part, ast.FunctionDef))
            yield from ((f"{each.name}.{function.name}", function) for function in functions)


def _others(module: ast.Module) -> Iterator[tuple[str, Sequence[ast.AST]]]:
    """What is neither a function nor in all generated code, with the names of its graphs."""
    outside: list[ast.AST] = []
    for each in module.body:
        if isinstance(each, ast.ClassDef):
            inside = [part for part in each.body if not isinstance(part, ast.FunctionDef)]
            head = (*each.decorator_list, *each.bases, *each.keywords)
            yield f"{each.name}.(class)", (*head, *inside)
        elif not isinstance(each, ast.FunctionDef) and not _is_generated(each):
            outside.append(each)
    yield "(module)", outside


def _is_generated(statement: ast.stmt) -> bool:
    """Return whether ``statement`` is an import of all generated code, or a name of an operator,
    which calls of it show."""
    match statement:
        case ast.Assign(value=ast.Attribute() as value):
            return ast.unparse(value).startswith("torch.ops.")
    return ast.unparse(statement) in _IMPORTS


def _does_nothing(part: ast.AST) -> bool:
    """Return whether ``part`` is ``pass``, a docstring, or another constant that nothing reads."""
    match part:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
    return False


def _aliases(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that the head of the text gives to operators."""
    for each in module.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            operator_name = ast.unparse(each.value).removeprefix("torch.ops.")
            yield each.targets[0].id, operator_name.removesuffix(".default")


class _Callable:
    """A function that the text calls; a comparison reads only its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "builtins"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(self.__name__)


class _Function:
    """Reads one function, statement by statement."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases = aliases
        self._graph = Graph()
        self._values: dict[str, Any] = {}

    def read(self, function: ast.FunctionDef) -> Graph:
        self._read_parameters(function.args)
        for decorator in map(ast.unparse, function.decorator_list):
            # Generated functions are called through their classes, where it makes no difference.
            if decorator != "staticmethod":
                self._call(_Callable(f"@{decorator}"), ())
        for statement in function.body:
            self._read_statement(statement)
        return self._graph

    def read_others(self, parts: Sequence[ast.AST]) -> Graph:
        """Return a graph with a node for the text of each part."""
        for part in parts:
            if not _does_nothing(part):
                self._opaque(part)
        return self._graph

    def _read_parameters(self, given: ast.arguments) -> None:
        positional = [*given.posonlyargs, *given.args]
        required = len(positional) - len(given.defaults)
        defaults = [*[None] * required, *given.defaults, *given.kw_defaults]
        parameters = [*zip([*positional, *given.kwonlyargs], defaults, strict=True)]
        parameters += [(each, None) for each in (given.vararg, given.kwarg) if each is not None]
        for parameter, default in parameters:
            node = self._graph.placeholder(parameter.arg)
            if default is not None:
                node.args = (self._read(default),)
            self._values[parameter.arg] = node

    def _read_statement(self, statement: ast.stmt) -> None:
        match statement:
            case _ if _does_nothing(statement):
                pass
            case ast.Delete():
                pass  # where a value is freed does not affect what is computed
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._read(value, _name_of(target)))
            case ast.Expr(value=value):
                self._read(value)
            case ast.Return(value=value):
                self._graph.output(None if value is None else self._read(value))
            case _:
                node = self._opaque(statement)
                stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
                names = [name.id for name in stored if isinstance(name.ctx, ast.Store)]
                self._values.update(dict.fromkeys(names, node))

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._values[name] = value
            case ast.Tuple(elts=parts):
                for index, part in enumerate(parts):
                    item = (value, index)
                    self._assign(part, self._call(operator.getitem, item, name=_name_of(part)))
            case _:  # an element or attribute is written
                self._call(_Callable(f"{ast.unparse(target)} ="), (value,))

    def _read(self, value: ast.expr, name: str = "") -> Any:
        """Return the node, or the literal, for an expression."""
        match value:
            case ast.Tuple(elts=parts):
                return tuple(map(self._read, parts))
            case ast.List(elts=parts):
                return list(map(self._read, parts))
            case ast.Name(id=known) if known in self._values:
                return self._values[known]
            case ast.Call():
                return self._read_call(value, name)
        known_names = self._values.keys()
        if not any(isinstance(n, ast.Name) and n.id in known_names for n in ast.walk(value)):
            return self._literal(value)
        return self._read_operator(value, name)

    def _literal(self, value: ast.expr) -> Any:
        try:
            return ast.literal_eval(value)
        except ValueError:  # such as torch.float32
            text = ast.unparse(value)
            return self._aliases.get(text, text)

    def _read_operator(self, value: ast.expr, name: str) -> Node:
        match value:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                operands = (self._read(left), self._read(right))
                return self._call(_OPERATORS[type(op)], operands, name=name)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return self._call(_OPERATORS[type(op)], (self._read(operand),), name=name)
            case ast.Subscript(value=of, slice=index):
                item = (self._read(of), self._read(index))
                return self._call(operator.getitem, item, name=name)
        return self._opaque(value, name)

    def _read_call(self, call: ast.Call, name: str) -> Node:
        args = [self._read(arg) for arg in call.args]
        kwargs = {each.arg or "**": self._read(each.value) for each in call.keywords}
        function = call.func
        if isinstance(function, ast.Attribute):
            of = self._read(function.value)
            # ``tp`` is a value too, whose methods are the collectives.
            if isinstance(of, Node) and of.target != "tp":
                return self._call(_Callable(f".{function.attr}"), (of, *args), kwargs, name)
        text = ast.unparse(function)
        # A local name is called by what it stands for, such as ``f = torch.sin``.
        head, dot, rest = text.partition(".")
        known = self._values.get(head)
        if isinstance(known, Node) and not dot:  # such as a lambda that reads other values
            return self._call(operator.call, (known, *args), kwargs, name)
        if isinstance(known, str):
            text = f"{known}{dot}{rest}"
        return self._call(_Callable(self._aliases.get(text, text)), tuple(args), kwargs, name)

    def _opaque(self, part: ast.AST, name: str = "") -> Node:
        """One node for anything else: its text, and the values that it reads."""
        names = (each.id for each in ast.walk(part) if isinstance(each, ast.Name))
        values = [self._values[each] for each in dict.fromkeys(names) if each in self._values]
        text = " ".join(ast.unparse(part).split())
        return self._call(_Callable(text), tuple(values), name=name)

    def _call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        name: str = "",
    ) -> Node:
        short = function.__name__.rpartition(".")[2]
        wanted = name or (short if short.isidentifier() else "value")
        return self._graph.create_node("call_function", function, args, kwargs, name=wanted)


def _name_of(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""
