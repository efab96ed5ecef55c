"""Composite operators that no sharding rule knows, as the operators they consist of."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from itertools import chain
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import mutates, tensor_operands
from sp_compiler.ir.op_traits import draws
from sp_compiler.ir.rewriting import fake_mode_of, insert_call, replace_results
from sp_compiler.ir.symbolic import is_open
from sp_compiler.rules.table import has_rule
from sp_compiler.trace.functionalize.composites import call_signature, is_composite, trace_call

_ORIGIN = Pass.NORMALIZE


def split_composites(graph: Graph, known: Collection[object]) -> None:
    """Replace composite operators without a sharding rule by their parts, if all of those have one.

    ``multiply(x, y)`` -> ``mul(x, y)``; ``outer(x, y)`` -> ``reshape(x, (n, 1)) * y``. They are
    synonyms of operators, such as NumPy's names, or short for a few operators; left whole, they
    would run replicated.

    Args:
        known: operators that later steps rewrite, in addition to those with a rule.
    """
    bodies: dict[Hashable, Graph | None] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target in known or not is_composite(node.target):
            continue
        if has_rule(node) or draws(node):
            continue
        # Every layer has the same few calls.
        key = call_signature(node)
        if key not in bodies:
            bodies[key] = _known_parts(node, known)
        if (body := bodies[key]) is not None:
            _replace(node, body)


def _known_parts(node: Node, known: Collection[object]) -> Graph | None:
    """Return the operators that a call runs, ``None`` if a later pass does not know one."""
    if not all(isinstance(x.meta["val"], Tensor) for x in node.all_input_nodes):
        return None  # an open size, which tracing would replace by the example's
    shapes = [x.meta["val"].shape for x in node.all_input_nodes]
    sizes = [leaf.node.expr for leaf in chain(*shapes) if is_open(leaf)]
    numbers = filter(is_open, tree_leaves((node.args, node.kwargs)))
    if any(number.node.expr not in sizes for number in numbers):
        return None  # an open size of another tensor, which the tracer would not know
    body = trace_call(node, fake_mode_of(node.graph))
    # A constant among the parts would be an attribute of another module.
    is_known = not body.find_nodes(op="get_attr") and all(_is_known(x, known) for x in _calls(body))
    return body if is_known else None


def _calls(body: Graph) -> list[Node]:
    return [node for node in body.nodes if node.op == "call_function"]


def _is_known(part: Node, known: Collection[object]) -> bool:
    if part.target in (operator.getitem, *known):
        return True
    # Some write into tensors that they made, which no later pass expects.
    if not isinstance(part.target, OpOverload) or mutates(part) or draws(part):
        return False
    # Without operands: a new tensor, which is the same on all ranks.
    return has_rule(part) or not tensor_operands(part)


def _replace(node: Node, body: Graph) -> None:
    values: dict[Node, Any] = dict(
        zip(body.find_nodes(op="placeholder"), node.all_input_nodes, strict=True)
    )
    for part in _calls(body):
        args, kwargs = map_arg((part.args, part.kwargs), values.__getitem__)
        values[part] = insert_call(node, part.target, args, kwargs, origin=_ORIGIN)
    (results,) = body.output_node().args
    replace_results(node, map_arg(results, values.__getitem__))
