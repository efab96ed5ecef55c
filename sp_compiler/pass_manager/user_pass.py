"""A user pass: run on the flat graph, and checked like a built-in one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import PassReport, UserPass, pass_name, report_of
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.op_traits import draws
from sp_compiler.ir.rewriting import inherit, refake
from sp_compiler.ir.symbolic import SYMBOLIC, same_shape
from sp_compiler.ir.text import dtype_name
from sp_compiler.options import Dropout
from sp_compiler.passes.normalize import normalize

_OURS = "sp_compiler"


def run_user_pass(captured: Captured, user_pass: UserPass, dropout: Dropout) -> None:
    """Run ``user_pass`` on the graph of ``captured``, and raise an error for an invalid result.

    A pass may add, change and erase calls of functional ATen operators. It may not change
    placeholders, or return other types and shapes than the model does. New nodes without
    ``meta["val"]`` and ``meta["requires_grad"]`` get them; existing entries of all nodes are
    compared with the operator's result, and a wrong one is an error. Wrong values in tensors of
    the right form are left for :func:`sp_compiler.verify` to find.

    Args:
        captured: the normalized graph.
        user_pass: see :class:`sp_compiler.options.Options`.
        dropout: the option; new nodes are normalized too, as later passes require.

    Raises:
        PassError: names the pass, and the node if there is one.
    """
    name = pass_name(user_pass)
    module = captured.module
    ours, inputs, outputs = (
        set(module.graph.nodes),
        captured.placeholders,
        _returned(module.graph),
    )
    # Before the pass runs, because it may write the metadata too.
    before = [node.meta["val"] for node in inputs], [_value(leaf) for leaf in outputs]
    try:
        _report(name, user_pass(module))
        module.graph.lint()
    except PassError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise PassError(name, f"raised {type(error).__name__}: {error}") from error
    _check_inputs(name, captured.placeholders, inputs, before[0])
    # Backwards, so that each of several consecutive new nodes inherits from a complete one.
    for node in reversed(module.graph.nodes):
        if node not in ours:
            node.meta["origin"] = name
            # A node that is inserted before another one belongs to the same layer.
            if "nn_module_stack" not in node.meta:
                inherit(node, node.next)
    for node in module.graph.nodes:
        if node.op == "call_function":
            _check_call(name, node)
        elif node.op not in ("placeholder", "output"):
            raise PassError(name, f"a {node.op} node; expected only calls of ATen operators", node)
    _check_outputs(name, module.graph, before[1])
    try:
        # Functions that the pass has decomposed stay decomposed.
        normalize(captured, dropout, spelled_out=True)
    except Exception as error:
        raise PassError(name, f"cannot be normalized: {error}") from error
    _check_outputs(name, module.graph, before[1])


def _report(name: str, result: Any) -> None:
    report = report_of(name)
    if isinstance(result, PassReport):
        report.add(result)
    elif isinstance(result, int):
        report.rewrote(int(result))
    elif result is not None:
        raise PassError(name, f"returned {type(result).__name__}; expected PassReport, int or None")


def _check_inputs(
    name: str, inputs: Sequence[Node], before: Sequence[Node], values: Sequence[Any]
) -> None:
    """Raise an error if placeholders or their values differ from ``before``."""
    # Callers pass parameters and inputs by position.
    if inputs != before:
        raise PassError(name, "changed the inputs of the graph; expected the same placeholders")
    for node, value in zip(inputs, values, strict=True):
        if node.meta.get("val") is not value:
            raise PassError(name, 'changed meta["val"] of an input', node)


def _check_call(name: str, node: Node) -> None:
    """Raise an error for an operator that is not known to be functional; complete and check its
    meta."""
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, OpOverload):
            what = getattr(target, "__name__", str(target))
            message = f"a call of {what}; expected an operator such as torch.ops.aten.relu.default"
            raise PassError(name, message, node)
        # The graph is functional: later passes move calls to wherever their operands exist, without
        # regard to writes.
        if target._schema.is_mutable:
            raise PassError(name, f"{target} writes to its inputs; expected a pure one", node)
        if draws(node) and target.namespace != _OURS:
            # Torch's generator would draw other numbers in recomputation, and on every
            # rank.
            raise PassError(name, f"{target} draws random numbers, which no pass may add", node)
    given = {key: node.meta[key] for key in ("val", "requires_grad") if key in node.meta}
    try:
        # The operator itself says what it returns: placements and bytes are computed from that.
        refake(node)
    except Exception as error:
        raise PassError(name, f"{target} does not take these operands: {error}", node) from error
    if node.users and isinstance(node.meta["val"], (int, float, *SYMBOLIC)):
        # Graphs have operators on tensors only: sizes, open ones too, are arguments.
        what = type(node.meta["val"]).__name__
        message = f'{target} returns {what}; expected tensors; a size is meta["val"].shape[dim]'
        raise PassError(name, message, node)
    if "val" in given and not _alike(given["val"], node.meta["val"]):
        expected = f"{_form(node.meta['val'])}, which the operator returns"
        message = f'meta["val"] is {_form(given["val"])}; expected {expected}'
        raise PassError(name, message, node)
    if given.get("requires_grad", node.meta["requires_grad"]) != node.meta["requires_grad"]:
        message = f'meta["requires_grad"] is {given["requires_grad"]}; autograd says otherwise'
        raise PassError(name, message, node)


def _check_outputs(name: str, graph: Graph, before: list[Any]) -> None:
    after = [_value(leaf) for leaf in _returned(graph)]
    if len(after) != len(before):
        raise PassError(name, f"the graph returns {len(after)} values; expected {len(before)}")
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if not _alike(old, new):
            raise PassError(
                name, f"output {index} of the graph is {_form(new)}; expected {_form(old)}"
            )


def _returned(graph: Graph) -> list[Any]:
    """Return the leaves that the graph returns: nodes, or objects that are the same in every
    call."""
    return list(graph.output_node().args[0])


def _value(leaf: Any) -> Any:
    """Return the fake value of a node and whether a gradient flows to it; any other object
    itself."""
    if not isinstance(leaf, Node):
        return leaf
    # As text, so that it reads well in the error that compares it.
    return leaf.meta["val"], "a gradient" if leaf.meta["requires_grad"] else "no gradient"


def _alike(one: Any, other: Any) -> bool:
    """Return whether two results have the same dtypes, shapes and devices, and equal other
    values."""
    first, second = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(second) and all(map(_alike_leaves, first, second))


def _alike_leaves(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    same = one.dtype is other.dtype and one.device == other.device
    return same and same_shape(one.shape, other.shape)


def _form(value: Any) -> str:
    def text(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return str(leaf)
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)} on {leaf.device}"

    return ", ".join(map(text, pytree.tree_leaves(value)))
