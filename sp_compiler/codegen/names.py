"""Names of the values of a region in generated code, the same in forward and backward.

A value gets the first of these names that exists and is free:

- the target of the user's statement that computed it: ``query_states``;
- the module that returns it: ``c_attn`` for ``h.0.attn.c_attn``;
- the target of a caller's statement;
- its operator: ``softmax``.

A converted value is named after the original (``ln_1_gathered``), the gradient of a value ``grad_``
plus the value's name. Names depend only on the graph, so they are the same on every rank and in
every process.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.provenance import module_path
from sp_compiler.base.python_text import identifier
from sp_compiler.codegen.user_source import Frame, Statement, frames
from sp_compiler.ir.forward_backward import BEFORE, BEHIND
from sp_compiler.ir.fx import descendants
from sp_compiler.ir.op_traits import (
    MATMULS,
    RESHAPES,
    RESULT_NAMES,
    base,
    collective_of,
    conversion_of,
    is_cast,
    is_started,
    is_view,
    is_wait,
)
from sp_compiler.ir.text import render_dtype
from sp_compiler.trace.joint import JointGraph

aten = torch.ops.aten

# Names that generated code uses itself: modules, arguments, and the tuples that its functions pass
# on (see :mod:`.module_text`).
RESERVED = frozenset({
    "F", "device", "math", "torch", "tp",
    "recomputed", "recomputed_before", "rest", "rest_behind", "saved", "saved_before",
})  # fmt: skip
# Names that say nothing about the value; the module's is better where there is one.
_POOR = frozenset({"out", "output", "outputs", "res", "result", "ret", "temp", "tmp"})
_TRANSPOSES = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})
_SUFFIXES = {
    "all_gather": "_gathered",
    "shard": "_shard",
    "zero_pad_to_partial": "_partial",
}


class ValueNames:
    """Candidate names for the values of one region, best first, from which :mod:`.lifetimes`
    chooses.

    Args:
        joint: forward and backward in one graph; nodes of the partitioned graphs are found by name.
        layer: path of the region's layer, which is omitted from names.
    """

    def __init__(self, joint: JointGraph, layer: str = "") -> None:
        self._joint = joint
        # By name: the nodes of the forward and the backward are copies of these.
        self._nodes = {node.name: node for node in joint.graph.nodes}
        self._backward = joint.backward_nodes()
        self._assigned = _assigned_names(joint.graph, self._backward, layer)
        values = _forward_values(joint.graph, self._backward)
        self._source_of = {value: source for source, value in values.items()}
        self._gradient_of = _gradients(joint, values)
        self._cache: dict[Node, list[str]] = {}

    def candidates(self, node: Node) -> Sequence[str]:
        """Return candidate identifiers for a node of a forward or backward."""
        # A wait has the name of the value, and the started collective that name after "pending_".
        value = node.all_input_nodes[0] if is_wait(node) else node
        candidates = self._cached_candidates(value)
        candidates = [f"pending_{candidates[0]}"] if is_started(node) else candidates
        suffix = next((each for each in (BEFORE, BEHIND) if value.name.endswith(each)), "")
        if value.name not in self._nodes:
            candidates = [f"{name}{suffix}" for name in candidates]
        return [identifier(name, RESERVED) for name in candidates]

    def _base(self, node: Node) -> str:
        """Return the name without the number that made it unique, as a prefix for other names."""
        return self._cached_candidates(node)[0]

    def _cached_candidates(self, node: Node) -> list[str]:
        # Waits and views from later steps are not in the joint graph: their own nodes are used.
        own_name = node.name.removesuffix(BEFORE).removesuffix(BEHIND)
        node = self._nodes.get(node.name) or self._nodes.get(own_name, node)
        if node not in self._cache:
            self._cache[node] = [_operator_name(node)]  # in case the search comes back to it
            self._cache[node] = list(self._candidates(node)) or [_operator_name(node)]
        return self._cache[node]

    def _candidates(self, node: Node) -> Iterator[str]:
        if node.op == "placeholder":
            yield from self._placeholder(node)
        elif (conversion := conversion_of(node)) is not None:
            yield from self._converted(node, conversion.method)
        elif node in self._gradient_of:
            yield f"grad_{self._base(self._gradient_of[node])}"
        elif (first := _first_part(node)) is not None:
            # ln_1_rstd: a statistic is named after its norm.
            yield f"{self._base(first)}_{_operator_name(node)}"
        else:
            partial = "_partial" if self._is_partial(node) else ""
            for name in self._assigned.get(node, ()):
                yield f"{name}{partial}"
            suffix = _suffix(node)
            # A pass that split an operator may have named the parts ("scores"). Suffixes that
            # torch.fx appends to names are removed.
            source = re.sub(r"(_default)?(_\d+)*$", "", self._source_of.get(node, "")).strip("_")
            if source and not suffix and node.target is not operator.getitem:
                yield source
            if suffix and not self._assigned.get(node):
                named = node.args[0]  # up to a value with a name of its own
                while _suffix(named) and not self._assigned.get(named):
                    named = named.args[0]
                viewed = self._base(named)
                # If the value itself is nested, its name is free.
                yield from (viewed, f"{viewed}_{suffix}")

    def _placeholder(self, node: Node) -> Iterator[str]:
        tangents = self._joint.tangents
        if node in tangents:
            # A tangent is the gradient of the output that it belongs to, whatever autograd called
            # it.
            output = self._joint.tangent_outputs[tangents.index(node)]
            yield f"grad_{self._base(self._joint.outputs[output])}"
        else:
            yield node.name

    def _converted(self, node: Node, method: str) -> Iterator[str]:
        source = node.args[0]
        assert isinstance(source, Node)
        if method in _SUFFIXES:
            yield f"{self._base(source)}{_SUFFIXES[method]}"
        elif node in self._gradient_of:
            yield f"grad_{self._base(self._gradient_of[node])}"
        else:
            # The sum is the value itself, so it gets the name without "_partial".
            yield from (name.removesuffix("_partial") for name in self._cached_candidates(source))

    def _is_partial(self, node: Node) -> bool:
        """Return whether all uses of a value are reductions over the ranks."""
        users = [user for user in node.users if user not in self._backward]
        return bool(users) and all(
            collective_of(user) in ("reduce_scatter", "all_reduce") for user in users
        )


def is_reshape(node: Node) -> bool:
    """Return whether ``node`` is a view of the same elements in the same order."""
    return node.target in RESHAPES


def _suffix(node: Node) -> str:
    """Return the suffix for a view or copy of a value; "" for other nodes."""
    if node.target is aten.clone.default:
        return "contiguous"
    if is_cast(node):
        return render_dtype(node.meta["val"].dtype)
    if node.target in _TRANSPOSES:
        return "t"
    if not is_view(node) or node.target is operator.getitem:
        return ""
    return f"{node.meta['val'].dim()}d" if is_reshape(node) else _operator_name(node)


def _operator_name(node: Node) -> str:
    if node.op == "placeholder":
        return node.name
    # torch.matmul is traced as bmm; people write matmul.
    if node.target is aten.bmm.default:
        return "matmul"
    if node.target is not operator.getitem:
        return str(node.target.__name__).partition(".")[0].strip("_") or "value"
    source, index = node.args
    names = RESULT_NAMES.get(source.target, ())
    return names[index] if index < len(names) else f"{_operator_name(source)}_{index}"


def _first_part(node: Node) -> Node | None:
    """Return the first result of an operator, for further ones with their own names (``rstd``)."""
    if node.target is not operator.getitem or not node.args[1]:
        return None
    source = node.args[0]
    if source.target not in RESULT_NAMES:
        return None
    return next((part for part in source.users if part.args[1] == 0), None)


# Names from the user's source.


def _assigned_names(
    graph: Graph, backward: Collection[Node], layer: str
) -> Mapping[Node, list[str]]:
    """Return names of forward values from statements and modules, best first."""
    # By all frames down to the statement: a helper that is called twice binds its names twice.
    groups: dict[tuple[Frame, ...], dict[Node, None]] = {}
    traces: dict[Node, tuple[Frame, ...]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in backward and conversion_of(node) is None:
            trace = traces[node] = frames(node.meta.get("stack_trace") or "")
            # Statements of callers too: q = project(x) names what project returns.
            for depth in range(len(trace)):
                groups.setdefault(_group(trace[: depth + 1]), {})[node] = None
    by_statement: dict[tuple[Frame, ...], Mapping[Node, str]] = {}
    assigned: dict[Node, str] = {}
    for key, members in groups.items():  # in the order in which the statements ran
        by_statement[key] = _targets(key[-1].statement, members, backward, assigned)
        assigned.update(by_statement[key])
    candidates = {}
    for node, trace in traces.items():
        depths = range(len(trace), 0, -1)
        statements = [by_statement[_group(trace[:depth])].get(node, "") for depth in depths]
        modules = [] if is_reshape(node) else list(_module_names(node, backward, layer))
        # One letter or `out` says less than the module does, but still more than the operator.
        good = [name if len(name) > 1 and name not in _POOR else "" for name in statements]
        ranked = [*good[:1], *modules, *good[1:], *statements]
        candidates[node] = list(dict.fromkeys(name for name in ranked if name))
    return candidates


def _group(trace: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the statement of the innermost frame of ``trace``, and the call stack to it."""
    statement = trace[-1].statement
    last = trace[-1] if statement is None else Frame(statement.file, statement.line)
    return (*trace[:-1], last)


def _targets(
    statement: Statement | None,
    members: Collection[Node],
    backward: Collection[Node],
    assigned: Mapping[Node, str],
) -> Mapping[Node, str]:
    """Return which values computed by a statement are bound to which names.

    A statement assigns the value that it computes last; if that is uncertain, as in a loop, none
    gets a name. ``assigned`` has the names bound by earlier statements.
    """
    if statement is None:
        return {}
    # There are several for a tuple, a loop or a condition.
    last = [
        node
        for node in members
        if isinstance(node.meta.get("val"), Tensor)
        and any(user not in members for user in _uses(node, backward))
        and not (is_reshape(node) and node.args[0] in members)  # that one gets the name
    ]
    names = statement.targets
    if not statement.unpacks:
        return {last[0]: names[0]} if len(last) == 1 else {}
    sources = {node.args[0] if node.target is operator.getitem else node for node in last}
    if len(sources) == 1 and all(node.target is operator.getitem for node in last):
        return {node: names[node.args[1]] for node in last if node.args[1] < len(names)}
    if len(last) == 1 and len(statement.used) == 1:  # attn_output, attn_weights = attend(...)
        return {last[0]: names[statement.used[0]]}
    if statement.listed and len(last) == len(names):
        return dict(zip(last, names, strict=True))
    # query, key = rotate(query, key): a value computed from only one old value replaces it.
    made_of = {node: _operands(node, members, assigned).intersection(names) for node in last}
    renewed = {node: old.pop() for node, old in made_of.items() if len(old) == 1}
    return renewed if len(set(renewed.values())) == len(last) else {}


def _operands(node: Node, members: Collection[Node], assigned: Mapping[Node, str]) -> set[str]:
    """Return the names of earlier values from which ``node`` is computed."""
    names: set[str] = set()
    pending = [node]
    seen = {node}
    for part in pending:  # the list grows
        for operand in part.all_input_nodes:
            if operand in members or conversion_of(operand) is not None:
                if operand not in seen:
                    pending.append(operand)
                seen.add(operand)
            elif operand in assigned:
                names.add(assigned[operand])
    return names


def _uses(node: Node, backward: Collection[Node]) -> Iterator[Node]:
    """Return the forward nodes that use the value, in any placement and shape."""
    for user in node.users:
        if user in backward:
            continue
        yield user
        if conversion_of(user) is not None or is_reshape(user):
            yield from _uses(user, backward)


def _module_names(node: Node, backward: Collection[Node], layer: str) -> Iterator[str]:
    """Names of the modules that return ``node``, innermost first, plain and after their parent.

    The matmul with a module's weight counts as the module's result: a bias may follow.
    """
    parts = module_path(node).split(".")
    users = [user for user in _uses(node, backward) if conversion_of(user) is None]
    outside = [module_path(user) if user.op != "output" else "" for user in users]
    is_product = node.target in MATMULS and any(
        base(operand).op == "placeholder" for operand in node.all_input_nodes
    )
    for length in range(len(parts), len(layer.split(".")) if layer else 0, -1):
        path = ".".join(parts[:length])
        returned = any(user != path and not user.startswith(f"{path}.") for user in outside)
        if not path or not (returned or is_product):
            return
        # For layers.0, the number alone would not be a name.
        if not parts[length - 1].isdigit():
            yield parts[length - 1]
        if length > 1:
            yield f"{parts[length - 2]}_{parts[length - 1]}"
        is_product = False


# Gradients.


def _gradients(joint: JointGraph, values: Mapping[str, Node]) -> Mapping[Node, Node]:
    """Return the forward value of each gradient in backward, if it is known.

    A value that the backward of another operator takes is the gradient of that operator's result.
    """
    gradient_of: dict[Node, Node] = {}
    for grad, value in zip(joint.grads, joint.inputs, strict=True):
        if grad is not None:
            gradient_of.setdefault(grad, value)
    tangents = descendants(joint.tangents)
    # From the parameters back: a gradient is identified by its next user.
    for node in reversed(joint.graph.nodes):
        if node not in tangents or node.op != "call_function" or node in gradient_of:
            continue
        for user in node.users:
            if user in gradient_of and (is_view(user) or _is_sum(user, tangents)):
                gradient_of[node] = gradient_of[user]
                break
            source = user.meta.get("source")
            if source in values and source != node.meta.get("source") and user in tangents:
                gradient_of[node] = _part_taken(node, user, values[source])
                break
    return gradient_of


def _forward_values(graph: Graph, backward: Collection[Node]) -> Mapping[str, Node]:
    """Return the value of each differentiated operator; the first of several results."""
    values: dict[str, Node] = {}
    for node in graph.nodes:
        source, is_value = node.meta.get("source"), isinstance(node.meta.get("val"), Tensor)
        further = node.target is operator.getitem and node.args[1] != 0
        # The last one wins: the nodes that an operator was decomposed into end with its value.
        if source is not None and is_value and node not in backward and not further:
            values[source] = node
    return values


def _part_taken(gradient: Node, user: Node, value: Node) -> Node:
    """Return which part of a split value ``gradient`` belongs to: gradients are concatenated in
    order."""
    if user.target is not aten.cat.default or value.target is not operator.getitem:
        return value
    index = user.args[0].index(gradient)
    return next((part for part in value.args[0].users if part.args[1] == index), value)


def _is_sum(node: Node, tangents: Collection[Node]) -> bool:
    """Return whether the node adds the gradients of a value with several users."""
    return node.target is aten.add.Tensor and all(
        isinstance(arg, Node) and arg in tangents for arg in node.args
    )
