"""Attention that a model writes out by hand, or that has dropout, as one operator: on a GPU, where
it has a kernel.

::

    scores = matmul(q, k) * scale           (b, a, s, l)
    scores = where(mask, scores, -inf)                          context, logsumexp =
    probs = dropout(softmax(scores))                      ->        dropout_attention(q, k, v, ...)
    context = matmul(probs, v)              (b, a, s, w)

The operator saves one value per query instead of (b, a, s, l) ones, and leaves nothing to recompute
or to run in chunks. It is inserted before differentiation, because its gradient is an operator too,
and after sharding and its check, because the rules of matmuls and softmax place its parts. Scale,
mask and dropout are optional, as are casts and a merge of samples and heads between the steps. A
query that may see no key has the context 0, where a graph may produce NaN.

A bias is an obstacle, because it may be a mask of finite values: a query without keys then gets the
mean of all values, which does not follow from the value per query that the operator saves.

Returns a copy of the region. Reads ``meta["val"]`` and ``meta["placement"]``; the context has the
placement of the matmul that it replaces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from sp_compiler.base.pass_report import DeclinedError, Pass, report_of
from sp_compiler.ir.fx import arguments, calls, is_call, module_of, shape_of
from sp_compiler.ir.op_traits import is_cast
from sp_compiler.ir.program import Region
from sp_compiler.ir.rewriting import copy_graph, erase_dead, insert_call, replace_with
from sp_compiler.ops.attention import DROPOUT_ATTENTION
from sp_compiler.ops.dropout import DROPOUT

_ORIGIN = Pass.FUSE_ATTENTION
_aten = torch.ops.aten
DEVICES = ("cuda",)
"""Types of devices that have a kernel for the operator."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Queries and keys in a block of the kernel: with fewer, scores take little memory.
_LEAST_ROWS = 128
# Width of a head: tensor cores need at least 16 columns, and blocks must fit on a core.
_WIDTHS = range(16, 257)
_PRODUCTS = (_aten.matmul.default, _aten.bmm.default)
_SOFTMAX = (_aten.softmax.int, _aten._softmax.default)


def has_kernel(region: Region) -> bool:
    """Return whether ``region`` runs where the operator has a kernel."""
    values = (node.meta["val"] for node in region.placeholders)
    return any(isinstance(x, Tensor) and x.device.type in DEVICES for x in values)


def fuse_attention(region: Region) -> Region:
    """Return ``region`` with attention as single operators, where possible.

    Args:
        region: sharded.
    """
    graph = copy_graph(region.module.graph)
    for context in calls(graph, *_PRODUCTS):
        probabilities = _behind_softmax(context.args[0])
        if probabilities is None:
            continue
        try:
            _fuse(context, _Attention(context, probabilities))
        except DeclinedError as declined:
            report_of(_ORIGIN).decline(context, str(declined))
    erase_dead(graph)
    graph.lint()
    return replace(region, module=module_of(graph, region.module))


def _behind_softmax(node: Any) -> list[Node] | None:
    """Return the nodes from the last factor back to a softmax, inclusive; ``None`` without one."""
    steps: list[Node] = []
    while isinstance(node, Node) and node.op == "call_function":
        steps.append(node)
        if is_call(node, *_SOFTMAX):
            return steps
        if is_call(node, _aten.where.ScalarOther):
            node = node.args[1]
        elif _is_rearranged(node) or is_call(node, DROPOUT.overload):
            node = node.args[0]
        else:
            return None
    return None


def _is_rearranged(node: Node) -> bool:
    """Return whether a node has the values of its operand: cast, or with leading dims merged."""
    if is_cast(node):
        return node.meta["val"].is_floating_point()
    if not is_call(node, _aten.reshape.default):
        return False
    source = node.args[0]
    return isinstance(source, Node) and shape_of(source)[-2:] == shape_of(node)[-2:]


class _Attention:
    """The operator's arguments for a chain of nodes that ends in a matmul with values.

    Attributes:
        lead: samples and heads, as the scores have them at their dropout.
        query, key, value: factors of the matmuls; the keys are transposed, (..., d, l).
        scale: factor of the scores.
        mask: False where they are -inf.
        inverted: whether the mask is True there instead.
        dropout: the arguments of the dropout.

    Raises:
        DeclinedError: the operator does not compute the same as the chain.
    """

    def __init__(self, context: Node, probabilities: Sequence[Node]) -> None:
        self.value: Node = context.args[1]
        self._context = context
        self.scale = 1.0
        self.mask: Node | None = None
        self.inverted = False
        self.dropout: dict[str, Any] | None = None
        self._lead_of_mask: tuple[int, ...] = ()  # leading dims of the scores that it applies to
        for node in probabilities:
            self._alone(node)
        for node in probabilities[:-1]:
            self._read_probabilities(node)
        softmax = probabilities[-1]
        if softmax.args[1] not in (-1, len(shape_of(softmax)) - 1):
            raise DeclinedError("its softmax is not over the last dim")
        holder = next((x for x in probabilities if is_call(x, DROPOUT.overload)), softmax)
        self.lead = shape_of(holder)[:-2]
        node = softmax.args[0]
        while not is_call(node, *_PRODUCTS, _aten.baddbmm.default):
            self._alone(node)
            node = self._read_scores(node)
        self._alone(node)
        self.query, self.key = self._factors(node)
        self._require_kernel()

    def _alone(self, node: Any) -> None:
        if not isinstance(node, Node) or node.op != "call_function":
            raise DeclinedError("its scores are made elsewhere")
        if len(node.users) > 1:
            raise DeclinedError(f"{node.name} has other users")

    def _read_probabilities(self, node: Node) -> None:
        if is_call(node, DROPOUT.overload):
            given = arguments(node)
            if self.dropout is not None or given["num_queries"]:
                raise DeclinedError("its dropout is one of several")
            self.dropout = given
        elif is_call(node, _aten.where.ScalarOther):
            raise DeclinedError("its probabilities are changed after the softmax")

    def _read_scores(self, node: Node) -> Any:
        """Read a node between matmul and softmax; return the one before it."""
        if _is_rearranged(node):
            return node.args[0]
        if is_call(node, _aten.mul.Tensor, _aten.div.Tensor):
            scores, factor = node.args
            if isinstance(factor, int | float) and factor:
                self.scale *= 1 / factor if is_call(node, _aten.div.Tensor) else factor
                return scores
        elif self.scale < 0:
            raise DeclinedError("its masked scores are multiplied by a negative number")
        elif is_call(node, _aten.where.ScalarOther):
            mask, scores, lowest = node.args
            return self._read_mask(node, scores, mask, lowest, inverted=False)
        elif is_call(node, _aten.masked_fill.Scalar):
            scores, mask, lowest = node.args
            return self._read_mask(node, scores, mask, lowest, inverted=True)
        raise DeclinedError(f"{node.name} changes its scores")

    def _read_mask(
        self, node: Node, scores: Any, mask: Node, lowest: float, *, inverted: bool
    ) -> Any:
        if self.mask is not None:
            raise DeclinedError("its scores have more than one mask")
        # In a row without keys, finite scores would count.
        if lowest != -math.inf:
            raise DeclinedError(f"its mask makes scores {lowest}, not -inf")
        self.mask, self.inverted = mask, inverted
        self._lead_of_mask = shape_of(node)[:-2]
        return scores

    def _factors(self, product: Node) -> tuple[Node, Node]:
        if not is_call(product, _aten.baddbmm.default):
            query, key = product.args
            return query, key
        given = arguments(product)
        if given["beta"] != 0:
            raise DeclinedError("a bias is added to its scores")
        self.scale *= given["alpha"]
        return given["batch1"], given["batch2"]

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of the mask with the dims of ``lead``, queries and keys."""
        assert self.mask is not None
        shape, lead = shape_of(self.mask), self._lead_of_mask
        shape = (*[1] * (len(lead) + 2 - len(shape)), *shape)
        leading, rows = shape[:-2], shape[-2:]
        if lead == self.lead:
            return shape
        if math.prod(leading) == 1:
            return (*[1] * len(self.lead), *rows)
        if leading == (math.prod(self.lead),):  # samples and heads in one dim there
            return (*self.lead, *rows)
        raise DeclinedError(f"{self.mask.name} has other samples and heads than its probabilities")

    def _require_kernel(self) -> None:
        factors = self.query, self.key, self.value
        dtypes = {x.meta["val"].dtype for x in factors}
        if len(dtypes) > 1 or dtypes.isdisjoint(_DTYPES):
            raise DeclinedError(f"no kernel for {', '.join(sorted(map(str, dtypes)))}")
        shapes = [shape_of(x) for x in factors]
        if any(isinstance(size, SymInt) for size in (*self.lead, *sum(shapes, ()))):
            raise DeclinedError("its sizes are open: each would be compiled separately")
        self._require_lead(shapes)
        (*_, queries, width), (*_, keys), (*_, columns) = shapes
        if self.mask is not None and math.prod(self.mask_shape) == 1:
            raise DeclinedError("its mask is a single value")
        if min(queries, keys) < _LEAST_ROWS:
            raise DeclinedError(f"fewer than {_LEAST_ROWS} queries or keys")
        if width not in _WIDTHS or columns not in _WIDTHS:
            raise DeclinedError(f"no kernel for heads of {width} and {columns} columns")

    def _require_lead(self, factors: Sequence[tuple[int, ...]]) -> None:
        """Samples and heads are the same everywhere, in two dims or in one."""
        leads = {shape[:-2] for shape in factors}
        # A rank's part of them; if something else is sharded, scores cover only part of the keys.
        of_rows = {"R", "I"}
        placement = self._context.meta["placement"]
        if placement.is_sharded and placement.dim < len(shape_of(self._context)) - 2:
            of_rows.add(placement.kind)
        if placement.kind not in of_rows:
            raise DeclinedError(f"its context is {placement}: not sharded by samples or heads")
        ways = {self.lead, (math.prod(self.lead),)}
        is_whole = len(self.lead) in (1, 2) and all(len(shape) > 2 for shape in factors)
        if not is_whole or any(
            lead not in ways and self.lead != (math.prod(lead),) for lead in leads
        ):
            raise DeclinedError("its scores have other dims than samples, heads, queries and keys")
        if self.dropout is not None and self.dropout["world_size"] > 1:
            scores = len(self.lead) + 2
            if self.dropout["dim"] % scores >= len(self.lead):
                raise DeclinedError("its queries or keys are sharded")


def _fuse(context: Node, attention: _Attention) -> None:
    def made(target: Any, *args: Any) -> Node:
        return insert_call(context, target, args, origin=_ORIGIN)

    def shaped(x: Node, shape: Sequence[int]) -> Node:
        same = shape_of(x) == tuple(shape)
        return x if same else made(_aten.reshape.default, x, list(shape))

    ones = [1] * (2 - len(attention.lead))
    lead = (*ones, *attention.lead)
    key = made(_aten.transpose.int, attention.key, -2, -1)
    factors = (
        shaped(x, (*lead, *shape_of(x)[-2:])) for x in (attention.query, key, attention.value)
    )
    mask = attention.mask
    if mask is not None:
        mask = shaped(mask, (*ones, *attention.mask_shape))
    if mask is not None and attention.inverted:
        mask = made(_aten.logical_not.default, mask)
    tensors = (*factors, mask)
    place: tuple[Any, ...] = (None, attention.scale, 0.0, 0, 0, 1)
    if (given := attention.dropout) is not None:
        dim = given["dim"] % (len(attention.lead) + 2) + len(ones)
        where = given["p"], given["site"], dim, given["world_size"]
        place = given["seed"], attention.scale, *where, given["first_row"], given["padding"]
    fused = made(DROPOUT_ATTENTION.overload, *tensors, *place)
    result = shaped(made(operator.getitem, fused, 0), shape_of(context))
    result.meta["placement"] = context.meta["placement"]
    replace_with(context, result)
