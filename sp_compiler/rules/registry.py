"""Rows of the rule table, and the helpers that all families use to read nodes.

A row gives the factors of one call, only from shapes and constant arguments. Its other columns
describe how one rank calls the operator: a size argument has another value on a shard, and only
this table knows which arguments are sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import arguments, shape_of, tensor_operands
from sp_compiler.rules.factors import Dims, OpRule

FIRST_OPERAND = ((0,),)
"""Linear only in the first operand."""


@dataclass(frozen=True)
class LocalCall:
    """One rank's call of an operator.

    Attributes:
        node: the unsharded call.
        arguments: arguments by schema name; tensors are nodes of one rank's part, sizes are still
            those of the unsharded call.
        operands: placement of each tensor operand.
        results: placement of each result.
        result_shapes: shape of one rank's part of each result.
        world_size: number of ranks.
    """

    node: Node
    arguments: Mapping[str, Any]
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    world_size: int

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one rank's part of a tensor argument."""
        return tuple(self.arguments[name].meta["val"].shape)


Factors = Callable[[Node], OpRule | None]
LocalArguments = Mapping[str, Callable[[LocalCall], Any]]


def _never(call: LocalCall) -> bool:
    return False


@dataclass(frozen=True)
class Row:
    """One operator of the table.

    Attributes:
        factors: returns the factors of one call; ``None`` if it must run replicated.
        local_arguments: argument name to its value on one rank, for arguments that differ there.
        is_reshape: whether one rank's call only relabels its part. It becomes a plain reshape then,
            because the arguments refer to dims and sizes that the part does not have.
    """

    factors: Factors
    local_arguments: LocalArguments = field(default_factory=dict)
    is_reshape: Callable[[LocalCall], bool] = _never


ROWS: dict[str, Row] = {}
"""By the schema's name: one row serves every overload."""


def rule(
    *names: str,
    local_arguments: LocalArguments | None = None,
    is_reshape: Callable[[LocalCall], bool] = _never,
) -> Callable[[Factors], Factors]:
    """Register the decorated function and the other columns of :class:`Row` for each name."""

    def register(factors: Factors) -> Factors:
        for name in names:
            # Two families that claim one operator: which rule applied would depend on imports.
            assert name not in ROWS, f"{name} has two rules"
            ROWS[name] = Row(factors, local_arguments or {}, is_reshape)
        return factors

    return register


def operand_shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of the tensor operands in order, repeats included."""
    return [shape_of(operand) for operand in tensor_operands(node)]


def result_values(node: Node) -> list[Any]:
    """Return the results of ``node`` as a list, also if the operator has only one."""
    value = node.meta["val"]
    return list(value) if isinstance(value, (tuple, list)) else [value]


def result_shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of all results of ``node``."""
    return [tuple(value.shape) for value in result_values(node)]


def dims_by_name(node: Node, dims: Callable[[str, Node], Dims]) -> tuple[Dims, ...]:
    """Dims of the tensor operands of ``node`` in order, from their names in the schema."""
    # By name, because optional tensors that are not passed shift the positions of the others.
    by_operand = {
        argument: dims(name, argument)
        for name, argument in arguments(node).items()
        if isinstance(argument, Node)
    }
    return tuple(by_operand[operand] for operand in tensor_operands(node))


def positive_dim(dim: int, rank: int) -> int:
    """Return ``dim`` counted from the front; for a 0-dim tensor, 0 and -1 are allowed."""
    return dim % rank if rank else 0


def schema_name(node: Node) -> str:
    """Return ``"namespace::name"``, "" if it is not an operator of torch's dispatcher."""
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
