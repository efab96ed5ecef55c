"""Rewrite of an exported graph to functional operators: no in-place writes, no subgraphs.

``ExportedProgram.run_decompositions`` does that by tracing the graph again, which takes as long as
the export. Most models do not write in place in forward. For them it is enough to inline the
subgraphs and to replace the few composite operators that may return a view of their operand
(``to``, ``contiguous``, ``chunk`` ...) by the operators that they run for this shape and dtype.
This also works where sizes are left open.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._export.utils import _get_decomp_for_cia, _is_preservable_cia_op
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import calls, mutates, written_operands
from sp_compiler.ir.rewriting import fake_mode_of, inherit, make_call, replace_results
from sp_compiler.trace.functionalize.composites import call_signature, is_composite, trace_call
from sp_compiler.trace.functionalize.hidden_writes import (
    is_itself,
    refuse_hidden_writes,
    storages,
)
from sp_compiler.trace.functionalize.regions import (
    AUTOCAST,
    SET_GRAD,
    attribute_of,
    body_of,
    operands_of,
)

_aten = torch.ops.aten
_STATE = "sp_compiler_state."
# They update running statistics, which their schemas do not declare.
_NORMS = (_aten.batch_norm.default, _aten.instance_norm.default)


def functionalize(exported: ExportedProgram) -> ExportedProgram:
    """Rewrite ``exported``, the result of ``torch.export.export``, to functional operators.

    Composite operators that do not return views stay composite.

    Values computed under ``no_grad`` are detached. Nodes keep the module and source line of the
    user's model.

    Raises:
        UnsupportedError: a write into a tensor with a gradient that autograd does not record.
    """
    module = exported.graph_module
    is_written = any(map(mutates, _nodes(module)))
    if is_written:
        refuse_hidden_writes(module)
    _prepare_subgraphs(module, is_written)
    # torch internals: _is_any_autocast_enabled. Under autocast composites cast inside, which only
    # another trace records.
    if torch._C._is_any_autocast_enabled() or not all(map(_is_simple, _nodes(module))):
        # A norm that is kept as one operator would hide its write.
        writing = {x.target for x in _nodes(module) if _updates_statistics(x)}
        return _decomposed(exported, {x: _get_decomp_for_cia(x) for x in writing})
    _inline(module)
    _decompose_views(module.graph)
    return exported


def _decomposed(exported: ExportedProgram, table: dict[Any, Any]) -> ExportedProgram:
    """Run the decompositions of ``table``, with the model's state renamed meanwhile.

    They make it attributes of a ``GraphModule``, which has attributes itself, such as ``code``.
    """
    _erase_twins(exported)
    _forget_numbers(exported.graph)
    _rename_state(exported, _STATE.__add__)
    kept = {x.target for x in _nodes(exported.graph_module) if _is_kept(x.target)}
    # torch internals: _collect_all_valid_cia_ops, decomposition_table. Torch overrides the kept
    # operators one by one; for all its composites that took longer than the trace of a small model.
    # The decomposition of this loss asks whether there are any rows, which is unknown if a mask
    # chooses them; its kernels do not ask.
    with (
        mock.patch.object(exported_program, "_collect_all_valid_cia_ops", return_value=kept),
        mock.patch.dict(decomposition_table),
    ):
        decomposition_table.pop(_aten.nll_loss.default, None)
        exported = exported.run_decompositions(table)
    _rename_state(exported, lambda name: name.removeprefix(_STATE))
    return exported


def _forget_numbers(graph: Graph) -> None:
    """Set integer inputs to ``None``: export has written their values into their users.

    With open sizes, each would become a symbol again that is not the size of any input.
    """
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], int) and not node.users:
            node.meta["val"] = None


def _erase_twins(exported: ExportedProgram) -> None:
    """Erase the unused names of a buffer that modules share, in place.

    The graph uses one of them. With the others as inputs too, a write into that one would be a
    write into an operand that aliases another operand, which the decompositions cannot trace.
    """
    graph, signature = exported.graph, exported.graph_signature
    values = {**exported.state_dict, **exported.constants}
    inputs = list(zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True))
    buffers = [each for each in inputs if each[1].kind is InputKind.BUFFER]
    used = {id(values[spec.target]) for node, spec in buffers if node.users}
    for node, spec in buffers:
        if not node.users and id(values[spec.target]) in used:
            graph.erase_node(node)
            signature.input_specs.remove(spec)
            exported.state_dict.pop(spec.target, None)
            exported.constants.pop(spec.target, None)


def _rename_state(exported: ExportedProgram, rename: Callable[[str], str]) -> None:
    """Rename parameters, buffers and constants, in place."""
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        # The target of a write into an input is the name of that input, which stays.
        if spec.target is not None and spec.kind is not OutputKind.USER_INPUT_MUTATION:
            spec.target = rename(spec.target)
    for values in (exported.state_dict, exported.constants):
        items = [(rename(name), value) for name, value in values.items()]
        values.clear()
        values.update(items)


def _nodes(module: GraphModule) -> Iterator[Node]:
    """Yield all nodes, including those of subgraphs."""
    for node in module.graph.nodes:
        yield node
        if node.op == "get_attr" and isinstance(body := attribute_of(module, node), GraphModule):
            yield from _nodes(body)


def _is_simple(node: Node) -> bool:
    """Return whether the node writes nothing in place and its value consists of plain tensors and
    of sizes that follow from those of the inputs."""
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, Tensor) and (type(leaf) is not FakeTensor or leaf.is_conj()):
            return False
        if isinstance(leaf, torch.SymFloat | torch.SymBool):
            return False
        # The number of rows depends on data, such as a mask.
        if isinstance(leaf, Tensor | torch.SymInt) and free_unbacked_symbols(leaf):
            return False
    if node.op != "call_function" or node.target in (operator.getitem, SET_GRAD):
        return True
    if isinstance(node.meta["val"], torch.SymInt):
        return True
    if not isinstance(node.target, OpOverload) or mutates(node):
        return False
    return not _updates_statistics(node)


def _updates_statistics(node: Node) -> bool:
    """Return whether a batch or instance norm writes to its running mean and variance."""
    if node.target not in _NORMS:
        return False
    *_, running_mean, _, by_batch = node.args[:6]
    return bool(by_batch) and running_mean is not None


def _prepare_subgraphs(module: GraphModule, is_written: bool, records: bool = True) -> None:
    """Prepare grad-mode and autocast regions for inlining without a change of meaning.

    ``run_decompositions`` calls the body. The body is interpreted node by node, so that its nodes
    keep the module and source line of the user's model.

    Args:
        is_written: whether any region writes in place.
        records: whether gradients are recorded where ``module`` runs.
    """
    if is_written and not records:
        _detach_what_is_written(module.graph)
    for node in calls(module.graph, SET_GRAD, AUTOCAST):
        body = body_of(module, node)
        inside = bool(node.args[0]) if node.target is SET_GRAD else records
        _prepare_subgraphs(body, is_written, inside)
        if node.target is SET_GRAD and node.args[0] is False:
            _detach_outputs(body, _detach_new_values(body) if is_written else set())
        # torch internals: GraphModule.forward of an exported subgraph, on the instance. A generated
        # forward is one frame, and run_decompositions would lose the provenance of its nodes.
        body.forward = Interpreter(body).run


def _detach_what_is_written(graph: Graph) -> None:
    """Detach the values that operators write: the tensor written into may get a gradient later,
    outside of the region."""
    for node in filter(mutates, list(graph.nodes)):
        targets = written_operands(node)
        for source in [x for x in node.all_input_nodes if x not in targets and _is_tensor(x)]:
            with graph.inserting_before(node):
                detached = make_call(
                    graph, _aten.detach.default, (source,), like=node, origin=Pass.EXPORT,
                    meta={"val": source.meta["val"]},
                )  # fmt: skip
            node.replace_input_with(source, detached)


def _detach_new_values(body: GraphModule) -> set[StorageWeakRef]:
    """Detach new tensors that a ``no_grad`` region returns, by a copy right after they are made.

    Later writes may give them a gradient, which would not flow through a detached view. Returns the
    storages of the detached tensors.
    """
    new: set[StorageWeakRef] = set()
    returned = {
        storage for value in body.graph.output_node().args[0] for storage in storages(value)
    }
    for node in list(body.graph.nodes):
        # The first node of a storage makes it; later ones are views of it, or write to it.
        own = returned.intersection(storages(node))
        if node.op == "output" or not own or not _is_tensor(node):
            continue
        if is_itself(node):  # not new, although the tracer may have made a tensor for it
            continue
        returned -= own
        if node.op == "placeholder":
            continue
        new |= own
        detach = _detached(body.graph, node)
        with body.graph.inserting_after(detach):
            copy = make_call(
                body.graph, _aten.clone.default, (detach,), like=node, origin=Pass.EXPORT,
                meta={"val": node.meta["val"]},
            )  # fmt: skip
        node.replace_all_uses_with(copy, lambda user, detach=detach: user is not detach)
    return new


def _detach_outputs(body: GraphModule, detached: set[StorageWeakRef]) -> None:
    """Detach the results of a ``no_grad`` region, since its grad mode is lost when it is inlined.

    Results in storages that are ``detached`` already, and tensors passed to the region, stay.
    """
    output, results = body.graph.output_node(), []
    for value in output.args[0]:
        value = _same_object(body, value)
        # A number computed from open sizes is not detached.
        is_made = isinstance(value, Node) and value.op != "placeholder" and _is_tensor(value)
        if is_made and detached.isdisjoint(storages(value)):
            value = _detached(body.graph, value)
        results.append(value)
    output.args = (tuple(results),)
    body.recompile()


def _same_object(module: GraphModule, value: Any) -> Any:
    """Return the first node that is the same tensor object as ``value``, also through regions."""
    while isinstance(value, Node):
        region = value.args[0] if value.target is operator.getitem else None
        if is_itself(value):
            value = value.args[0]
        elif isinstance(region, Node) and region.target in (SET_GRAD, AUTOCAST):
            body = body_of(module, region)
            inputs = body.graph.find_nodes(op="placeholder")
            result = _same_object(body, body.graph.output_node().args[0][value.args[1]])
            if result not in inputs:
                return value
            value = operands_of(region, body)[inputs.index(result)]
        else:
            return value
    return value


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


def _detached(graph: Graph, value: Node) -> Node:
    """Insert a detach after ``value``, whose users stay."""
    detach, meta = _aten.detach.default, {"val": value.meta["val"]}
    with graph.inserting_after(value):
        return make_call(graph, detach, (value,), like=value, origin=Pass.EXPORT, meta=meta)


# Functionalization without another trace.


def _inline(module: GraphModule) -> None:
    """Copy the nodes of every subgraph to where it is called."""
    graph = module.graph
    # Only grad mode: functionalize() leaves autocast regions to run_decompositions.
    for node in calls(graph, SET_GRAD):
        body = body_of(module, node)
        _inline(body)
        _replace(node, body.graph, node.args[2:])
    for attribute in graph.find_nodes(op="get_attr"):
        if not attribute.users:
            graph.erase_node(attribute)


def _replace(node: Node, body: Graph, inputs: Any) -> list[Node]:
    """Replace ``node`` by the nodes of ``body``, called with ``inputs``; return them."""
    # graph_copy does not return the new nodes: they are those between `before` and `node`.
    graph, before = node.graph, node.prev
    values = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        results = graph.graph_copy(body, values)
    new = []
    while before.next is not node:
        before = before.next
        new.append(before)
    replace_results(node, results)
    return new


def _decompose_views(graph: Graph) -> None:
    """Decompose the composite operators that ``run_decompositions`` would decompose."""
    mode = fake_mode_of(graph)
    bodies: dict[Hashable, Graph] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_decomposed(node.target):
            continue
        # Every layer has the same few calls, and each trace takes a millisecond.
        key = call_signature(node)
        if key not in bodies:
            bodies[key] = trace_call(node, mode)
        for new in _replace(node, bodies[key], node.all_input_nodes):
            inherit(new, node)


def _is_decomposed(target: Any) -> bool:
    """Return whether an operator is decomposed; ``reshape`` is not: all views become reshapes."""
    return is_composite(target) and target is not _aten.reshape.default and not _is_kept(target)


def _is_kept(target: Any) -> bool:
    """Return whether an operator is a composite that ``run_decompositions`` keeps."""
    # torch internals: _is_preservable_cia_op. With a list of our own, the two ways to functionalize
    # could differ.
    return isinstance(target, OpOverload) and _is_preservable_cia_op(target)
