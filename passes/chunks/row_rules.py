"""The dim of rows in each operand and result, from the factors of the sharding rules.

A rule holds for a chunked factor as for a sharded one: a result with the factor is one chunk, a
result without it is a part of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, is_call, placements_of, shape_of, tensor_operands
from sp_compiler.ops.dropout import DROPOUT, DROPOUT_MASK
from sp_compiler.ops.registry import operator_of
from sp_compiler.rules.factors import Dims, Factor, OpRule, numbered, private
from sp_compiler.rules.registry import dims_by_name, operand_shapes, result_shapes
from sp_compiler.rules.table import rule_for

aten = torch.ops.aten
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
DROPOUTS = (DROPOUT.overload, DROPOUT_MASK.overload)


@dataclass(frozen=True)
class RowDims:
    """Dims of rows in the tensors of one operator; ``None`` if a tensor has none.

    Attributes:
        operands: of each tensor operand.
        results: of each result; ``None``: a sum over the rows.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


def row_dims(node: Node, known: Mapping[Node, int]) -> RowDims | None:
    """Follow the rows through ``node``; ``None`` if it cannot run on chunks.

    Args:
        node: a call whose result is a tensor or several.
        known: the dim of rows of operands, or of ``node`` itself if it has one result.
    """
    rule = _of_dropout(node) if is_call(node, *DROPOUTS) else factors_of(node)
    if rule is None or rule.placed:
        return None
    operands = tensor_operands(node)
    places = [(rule.operands[at], known[x]) for at, x in enumerate(operands) if x in known]
    places += [(rule.results[0], known[node])] if node in known else []
    # A rule may omit the last dims.
    if any(len(tensor) <= dim for tensor, dim in places):
        return None
    dims = [tensor[dim] for tensor, dim in places]
    # A single factor: rows that are merged with another dim are not contiguous in it.
    if len(set(dims)) != 1 or len(dims[0]) != 1 or dims[0][0].blocked:
        return None
    (factor,) = dims[0]
    operand_dims, result_dims = (_positions(x, factor) for x in (rule.operands, rule.results))
    if operand_dims is None or result_dims is None:
        return None
    is_summed = any(factor.name == each.name for each in rule.contracted)
    if None in result_dims and not is_summed:
        return None
    # A chunk of ``x @ x.T`` reads some rows of ``x`` and all of them: two values for one operand.
    if len(dict.fromkeys(operands)) != len(dict.fromkeys(zip(operands, operand_dims, strict=True))):
        return None
    return RowDims(operand_dims, result_dims)


def _positions(tensors: Sequence[Dims], factor: Factor) -> tuple[int | None, ...] | None:
    """The dim of each tensor that is ``factor``; ``None`` if it is only a part of a dim."""
    positions: list[int | None] = []
    for dims in tensors:
        at = [place for place, dim in enumerate(dims) if factor.name in (f.name for f in dim)]
        if len(at) > 1 or (at and dims[at[0]] != (factor,)):
            return None
        positions.append(at[0] if at else None)
    return tuple(positions)


def factors_of(node: Node) -> OpRule | None:
    """Return the factors of any operator, including our own; ``None`` if they are unknown."""
    ours = operator_of(node.target)
    if is_call(node, *_LOSSES):
        return _of_loss(node)
    if ours is None:
        return rule_for(node)
    shapes = operand_shapes(node), result_shapes(node)
    conversion = placements_of(node)
    if conversion is not None:
        # A chunk of every rank's part, unless the rows are sharded over the ranks.
        cut = [placement.dim for placement in conversion if placement.is_sharded]
        operands, results = ([numbered(shape, cut) for shape in side] for side in shapes)
        return OpRule(tuple(operands), tuple(results))
    # An operator that gets its position in the global tensor can be told only of a rank's part.
    if not ours.dims or ours.placed:
        return None
    sides = (side.replace("...", ".").split(",") for side in ours.dims.split("->"))
    operands, results = (
        [_lettered(letters, shape) for letters, shape in zip(texts, side, strict=True)]
        for texts, side in zip(sides, shapes, strict=True)
    )
    return OpRule(tuple(operands), tuple(results))


def _of_loss(node: Node) -> OpRule | None:
    """Return the factors of a loss per row, and of its gradient, for which there are no sharding
    rules."""
    bound = arguments(node)
    if bound["reduction"]:
        return None  # :func:`.losses_by_row` leaves none of these
    logits = numbered(shape_of(bound["self"]), blocked=(1,))
    dims = {"grad_output": logits[:1], "self": logits, "target": logits[:1], "total_weight": ()}
    operands = dims_by_name(
        node, lambda name, x: private(shape_of(x), "w") if name == "weight" else dims[name]
    )
    if is_call(node, aten.nll_loss_backward.default):
        return OpRule(operands, (logits,), rows="fixed")
    return OpRule(operands, (logits[:1], ()), contracted=logits[0], rows="fixed")


def _of_dropout(node: Node) -> OpRule | None:
    """Return the factors of dropout between attention's matmuls, whose queries can be chunked."""
    bound, (shape,) = arguments(node), result_shapes(node)
    queries = len(shape) - 2
    is_sharded = bound["world_size"] > 1 and bound["dim"] % max(1, len(shape)) == queries
    # It computes positions along one dim that is cut, once: by ranks, or in chunks.
    if len(shape) < 3 or is_sharded or bound["num_queries"]:
        return None
    dims = numbered(shape, [dim for dim in range(len(shape)) if dim != queries])
    return OpRule((dims, ()), (dims,))


def _lettered(letters: str, shape: Sequence[int]) -> Dims:
    """One factor per letter; the dims of "." are numbered from the front."""
    count = len(shape) - len(letters) + 1
    names = [
        name
        for letter in letters
        for name in (map(str, range(count)) if letter == "." else [letter])
    ]
    return tuple((Factor(name, size),) for name, size in zip(names, shape, strict=True))
