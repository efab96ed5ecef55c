"""The statements of one generated function, in the sections of the user's modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from torch.fx import Graph, Node

from sp_compiler.base.provenance import module_path
from sp_compiler.base.python_text import comment
from sp_compiler.codegen.descriptions import describe
from sp_compiler.codegen.expressions import Printer, first_alone
from sp_compiler.codegen.lifetimes import Lifetimes, assigned, is_unpacked
from sp_compiler.codegen.nesting import Apart, Nesting
from sp_compiler.ir.fx import placements_of
from sp_compiler.ir.op_traits import base, is_collective, is_identity, is_started, is_view, is_wait

WIDTH = 100
"""Of a statement, without its indentation and the comment after it."""
# A little more is better than three lines for one statement: what is nested was decided with
# tentative names, and the final ones may be longer.
_SLACK = 8
_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKENS = re.compile(rf"{_STRING}|[()\[\],]")


class Body:
    """The statements of one graph.

    Args:
        graph: a forward or backward.
        printer: has tentative names, whose lengths decide what is nested.
        layer: prefix that is omitted from module paths.
        gradients: whether the function returns gradients.
        apart: what is in separate statements (:class:`.nesting.Nesting`).
    """

    def __init__(
        self, graph: Graph, printer: Printer, layer: str, *, gradients: bool, apart: Apart
    ) -> None:
        self.graph = graph
        self.printer = printer
        self._layer = layer
        self._depth = _common_depth(graph)
        self._nesting = nesting = Nesting(graph, printer.idioms, gradients, self._fits, apart)
        printer.nested = nesting.nested
        nesting.run()
        self._parts = {node: list(nesting.tree(node)) for node in nesting.statements}
        self._deaths: Mapping[Node, Sequence[str]] = {}

    def choose_names(
        self,
        candidates: Callable[[Node], Sequence[str]],
        given: Mapping[str, str],
        taken: Collection[str],
    ) -> None:
        """Give the final names; the arguments are those of :class:`Lifetimes`."""
        nested = self._nesting.nested
        lifetimes = Lifetimes(self.graph, self._parts, nested, candidates, given, taken)
        self.printer.names = lifetimes.names
        self._deaths = lifetimes.deaths()

    def lines(self) -> list[str]:
        """Return the statements with section comments and ``del`` statements."""
        lines: list[str] = []
        # A wait counts too, because an arriving value may have to be copied into place.
        allocates = [
            any(is_wait(part) or not is_view(part) for part in parts)
            for parts in self._parts.values()
        ]
        left = sum(allocates)
        place = -1
        for path, section in self._sections():
            recomputed = [_is_recomputed(node) for node in section]
            # The word is in the heading, or after each line, but not in both.
            if path:
                title = f"recompute {path}" if all(recomputed) else path
                lines += [*([""] if lines else []), comment(title)]
            dead: list[str] = []
            for node, again in zip(section, recomputed, strict=True):
                place += 1
                # Until something is allocated, dead values cost nothing.
                if dead and allocates[place]:
                    lines += _deletion(dead)
                    dead = []
                lines += self._statement(
                    node, "recomputed" if again and not all(recomputed) else ""
                )
                left -= allocates[place]
                rebound = assigned(node, self.printer.names)
                dead = [name for name in dead if name not in rebound]
                # Where nothing more is allocated, values are freed when the function returns.
                dead += self._deaths.get(node, []) if left else []
            lines += _deletion(dead)
        return lines

    def _sections(self) -> list[tuple[str, list[Node]]]:
        """Group statements by module.

        Views and communication are grouped with their users.
        """
        sections: list[tuple[str, list[Node]]] = []
        pending: list[Node] = []
        for node, parts in self._parts.items():
            pending.append(node)
            # Views and conversions of a value only move it.
            computes = [
                part
                for part in parts
                if is_unpacked(part) or not (is_view(part) or placements_of(part) is not None)
            ]
            # Views and collectives wait for the first statement that computes, and join its
            # section.
            if not computes and node is not next(reversed(self._parts)):
                continue
            # The innermost expression is evaluated first; the statement belongs to the last one.
            path = self._section_path(computes[-1] if computes else node)
            if not sections or path not in ("", sections[-1][0]):
                sections.append((path, []))
            sections[-1][1].extend(pending)
            pending = []
        return _without_small_recomputations(sections)

    def _section_path(self, node: Node) -> str:
        """The child of the layer that ``node`` belongs to; "" where unknown."""
        if "nn_module_stack" not in node.meta:
            return ""
        path = module_path(node)
        if path in ("", self._layer):
            return "(block)" if self._layer else "(model)"
        # Deeper modules have no sections of their own: an attention is read in one piece.
        depth = self._depth + 1
        inner = ".".join(path.split(".")[:depth])
        return inner.removeprefix(f"{self._layer}.") if self._layer else inner

    def _fits(self, node: Node) -> bool:
        node = self._nesting.statement_of(node)
        text = f"{self._target(node)} = {self.printer.expression(node)}"
        return len(text) <= WIDTH

    def _statement(self, node: Node, remark: str) -> list[str]:
        notes = [remark, self._note(node)]
        if is_identity(node):
            notes.append(f"{node.args[1]} -> {node.args[2]}")
        text = " ".join(note for note in notes if note)
        lines = _wrapped(self._target(node), self.printer.expression(node))
        return [*lines[:-1], f"{lines[-1]}  {comment(text)}" if text else lines[-1]]

    def _note(self, node: Node) -> str:
        # With several results, the comment describes the first.
        first = min(node.users, key=lambda part: part.args[1]) if is_unpacked(node) else node
        note = describe(first, self.printer)
        if not is_collective(node) and not is_wait(node):
            return note
        # Nothing else in the text looks like these arrows, so collectives are easy to find.
        return f"<== {note}" if not is_started(node) else f"==> {note}"

    def _target(self, node: Node) -> str:
        names = assigned(node, self.printer.names)
        of_one = len(names) == 1 and is_unpacked(node) and not first_alone(node)
        return ", ".join(names) + ("," if of_one else "")


def _without_small_recomputations(
    sections: Sequence[tuple[str, list[Node]]],
) -> list[tuple[str, list[Node]]]:
    """Keep one or two recomputed statements with the statements that need them.

    A heading and a blank line for each would tear apart the section that needs them.
    """
    merged: list[tuple[str, list[Node]]] = []
    early: list[Node] = []
    for path, nodes in sections:
        if len(nodes) < 3 and all(map(_is_recomputed, nodes)):
            early += nodes
            continue
        if merged and merged[-1][0] == path:
            merged[-1][1].extend([*early, *nodes])
        else:
            merged.append((path, [*early, *nodes]))
        early = []
    return [*merged, ("", early)] if early else merged


def _deletion(names: Sequence[str]) -> list[str]:
    return [f"del {line.rstrip(',')}" for line in fill(", ".join(names))]


def _is_recomputed(node: Node) -> bool:
    return bool(node.meta.get("recomputed")) and base(node).op != "placeholder"


def _common_depth(graph: Graph) -> int:
    """Return the number of modules that enclose all nodes of the graph."""
    nodes = [node for node in graph.nodes if "nn_module_stack" in node.meta]
    paths = [module_path(node).split(".") for node in nodes if node.op == "call_function"]
    if not paths:
        return 0
    # Modules that the first and the last path in sorted order share are shared by all.
    first, last = min(paths), max(paths)
    same = [a == b for a, b in zip(first, last, strict=False)]
    return [*same, False].index(False)


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def fill(text: str) -> list[str]:
    """Wrap comma-separated items into lines without breaking an item that fits in a line."""
    lines: list[str] = []
    for word in _items(text):
        if lines and len(lines[-1]) + 1 + len(word) <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _items(text: str) -> list[str]:
    """Split ``text`` after commas that are outside of brackets and strings."""
    # Not str.split: commas inside calls and strings separate nothing here.
    depth, start, items = 0, 0, []
    for token in _TOKENS.finditer(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token[0], 0)
        if token[0] == "," and not depth:
            items.append(text[start : token.end()].strip())
            start = token.end()
    return [item for item in (*items, text[start:].strip()) if item]


def _wrapped(target: str, expression: str) -> list[str]:
    """Return an assignment, wrapped inside its parentheses if it is long."""
    if len(target) + len(expression) + 3 <= WIDTH + _SLACK:
        return [f"{target} = {expression}"]
    # Broken inside the outermost call if there is one: a `(` on a line of its own says nothing.
    opening = _closed_last(expression)
    if opening is None:
        return [f"{target} = (", *indented(fill(expression)), ")"]
    inside = expression[opening + 1 : -1]
    return [f"{target} = {expression[: opening + 1]}", *indented(fill(inside)), ")"]


def _closed_last(expression: str) -> int | None:
    """Return where the parenthesis opens that the last character closes, else ``None``."""
    opened: list[int] = []
    last = None
    for token in _TOKENS.finditer(expression):
        if token[0] in "([":
            opened.append(token.start())
        elif token[0] in ")]":
            last = opened.pop()
    return last if expression.endswith(")") else None
