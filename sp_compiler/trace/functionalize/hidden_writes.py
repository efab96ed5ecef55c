"""In-place writes that autograd does not record, into tensors whose gradient it records.

::

    h = linear(x)                    d = h.detach()
    with torch.no_grad():            d.mul_(2)
        h.mul_(2)

Eager code that reads ``h`` continues with the new values and the gradient of the old ones, as if
nothing had been written. In a functional graph the result of the write is another value, which is
detached: gradients that eager code computes would be silently lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.fx import arguments, carries_gradient, mutates, written_operands
from sp_compiler.ir.op_traits import FILLED
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.functionalize.regions import AUTOCAST, SET_GRAD, body_of, operands_of

_aten = torch.ops.aten
_DROPOUTS = (
    *(_aten.dropout.default, _aten.feature_dropout.default),
    *(_aten.alpha_dropout.default, _aten.feature_alpha_dropout.default),
)
_MAY_RETURN_ITSELF = frozenset(
    overload
    for packet in (
        *(_aten.to, _aten.contiguous, _aten.type_as, _aten.flatten, _aten.positive),
        *(_aten.atleast_1d, _aten.atleast_2d, _aten.atleast_3d, _aten.real, _aten.conj),
        *(_aten.resolve_conj, _aten.resolve_neg),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
)
_WITHOUT_GRADIENT = frozenset(
    {_aten.detach.default, _aten.empty_like.default, _aten.new_empty.default, *FILLED}
    | {_aten.rand_like.default, _aten.randn_like.default}
)


def storages(value: Any) -> list[StorageWeakRef]:
    """Return the storages of the tensors that a node returns; a view has that of its base."""
    leaves = pytree.tree_leaves(value.meta.get("val")) if isinstance(value, Node) else []
    return [
        StorageWeakRef(leaf.untyped_storage())
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    ]


def is_itself(node: Node) -> bool:
    """Return whether the operator returned its operand, the same object: ``x.float()`` of float32,
    ``x.add_(y)``. Later uses of ``x`` are recorded as uses of this node."""
    if mutates(node):
        return written_operands(node) == [node.args[0]] and storages(node) == storages(node.args[0])
    if node.target in _DROPOUTS:
        # Decided by the arguments: the tracer runs another operator, which returns a new tensor.
        given = arguments(node)
        return not given["train"] or given["p"] == 0
    if node.target not in _MAY_RETURN_ITSELF or not isinstance(node.args[0], Node):
        return False
    value, given = node.meta["val"], node.args[0].meta["val"]
    if not isinstance(value, Tensor) or storages(node) != storages(node.args[0]):
        return False
    return same_shape(value.shape, given.shape) and same_shape(value.stride(), given.stride())


def refuse_hidden_writes(module: GraphModule) -> None:
    """Raise an error for such a write in a graph of ``torch.export``, or in one of its regions.

    Raises:
        UnsupportedError: names the line of the write.
    """
    walk = _Walk()
    for node in module.graph.find_nodes(op="placeholder"):
        walk.given.update(storages(node))
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.requires_grad:
            walk.with_gradient.update(storages(node))
    detached = walk.run(module, records=True, detached=[])
    results = zip(module.graph.output_node().args[0], detached, strict=True)
    walk.refuse_reads([value for value, is_detached in results if not is_detached])


class _Walk:
    """One pass over the nodes of a graph and its regions, in the order in which they run.

    Attributes:
        given: storages of parameters, buffers and inputs. Export itself refuses writes into them,
            except into buffers, through which no gradient flows from one call to the next.
        with_gradient: storages of tensors with a gradient.
        hidden: the last unrecorded write into each storage.
    """

    def __init__(self) -> None:
        self.given: set[StorageWeakRef] = set()
        self.with_gradient: set[StorageWeakRef] = set()
        self.hidden: dict[StorageWeakRef, Node] = {}

    def run(self, module: GraphModule, *, records: bool, detached: list[bool]) -> list[bool]:
        """Return which results are detached views, given which inputs are (``detached``)."""
        given, known = iter(detached), dict[Node, bool]()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given, False)
            elif node.op == "output":
                return [known.get(value, False) for value in node.args[0]]
            elif node.target in (SET_GRAD, AUTOCAST):
                self._region(module, node, records, known)
            elif node.op == "call_function" and node not in known:
                known[node] = self._call(node, records, known)
        return []

    def refuse_reads(self, recorded: Iterable[Any]) -> None:
        """Raise an error if a hidden write has changed a value that is read.

        Until it is read, no gradient is lost.

        Raises:
            UnsupportedError: names the line of the write.
        """
        for storage in (storage for value in recorded for storage in storages(value)):
            if storage in self.hidden:
                raise UnsupportedError(f"{_HIDDEN}{node_origin(self.hidden[storage])}")

    def _region(
        self, module: GraphModule, node: Node, records: bool, known: dict[Node, bool]
    ) -> None:
        graph = body_of(module, node)
        given = [known.get(operand, False) for operand in operands_of(node, graph)]
        if node.target is SET_GRAD:
            records = bool(node.args[0])
        results = self.run(graph, records=records, detached=given)
        for user in node.users:
            known[user] = results[user.args[1]]

    def _call(self, node: Node, records: bool, known: dict[Node, bool]) -> bool:
        """Return whether the result is a detached view."""
        sources = [source for source in node.all_input_nodes if storages(source)]
        detached = {source for source in sources if known.get(source, False)}
        has_gradient = any(
            source not in detached and not self.with_gradient.isdisjoint(storages(source))
            for source in sources
        )
        if node.target is _aten.detach_.default and has_gradient:
            raise UnsupportedError(f"{_DETACHES}{node_origin(node)}")
        own = set(storages(node))
        recorded = [source for source in sources if records and source not in detached]
        if mutates(node):
            self.refuse_reads(recorded)
            targets = written_operands(node)
            for target in targets:
                computed = set(storages(target)) - self.given
                is_hidden = not records or target in detached
                if is_hidden:
                    self.hidden.update(dict.fromkeys(computed & self.with_gradient, node))
                if has_gradient and records:
                    self.with_gradient.update(storages(target))
            return not detached.isdisjoint(targets)
        if is_itself(node):
            return node.args[0] in detached
        is_detached = not records or node.target in _WITHOUT_GRADIENT
        aliased = {source for source in sources if own.intersection(storages(source))}
        if aliased:
            return is_detached or not aliased.isdisjoint(detached)
        if not is_detached:
            self.refuse_reads(recorded)
        values = pytree.tree_leaves(node.meta.get("val"))
        numbers = any(isinstance(value, Tensor) and carries_gradient(value) for value in values)
        if has_gradient and numbers and not is_detached:
            self.with_gradient |= own
        return False


_DETACHES = "the forward calls detach_(), which a graph cannot express; write x = x.detach()\n"
_HIDDEN = (
    "the forward writes in place, without recording it (under torch.no_grad(), or into a detached "
    "view), into a tensor that has a gradient, which a graph would lose: write "
    "y = x + (new - x).detach() instead, x = new.detach() if no gradient is to flow, or into a "
    "copy, x.detach().clone()\n"
)
