"""The rule table: from a node to its row.

An operator without a row runs replicated: a missing rule or strategy costs speed, never
correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.rules.factors import OpRule, record_cuts
from sp_compiler.rules.families import (  # noqa: F401 - they register their rows
    attention,
    elementwise,
    experts,
    fourier,
    images,
    indexing,
    norms,
    products,
    reductions,
    views,
)
from sp_compiler.rules.registry import (
    ROWS,
    LocalCall,
    Row,
    operand_shapes,
    result_shapes,
    schema_name,
)

_POINTWISE_ROW = Row(elementwise.pointwise)


def row_of(node: Node) -> Row | None:
    """Return the row of the operator of ``node``; all pointwise operators, by PyTorch's own tag,
    share one row."""
    row = ROWS.get(schema_name(node))
    if row is not None or not isinstance(node.target, torch._ops.OpOverload):
        return row
    # For several results (frexp) a row would have to describe each.
    is_single = len(node.target._schema.returns) == 1
    return _POINTWISE_ROW if is_single and torch.Tag.pointwise in node.target.tags else None


def rule_for(node: Node) -> OpRule | None:
    """Return the factors of ``node``, or ``None`` if it must run replicated."""
    row = row_of(node)
    return None if row is None else row.factors(node)


def has_rule(node: Node) -> bool:
    """Return whether the table has the operator; its rule may still leave it replicated."""
    return row_of(node) is not None


def missing_rule(node: Node, name: str) -> str:
    """Return the text that ``node``, called ``name`` in it, has no rule."""
    # Distinguished, because only an operator without a row can be given a rule by the user.
    limits = " with these shapes and arguments" if has_rule(node) else ""
    return f"no sharding rule for {name}{limits}"


def is_pointwise(node: Node) -> bool:
    """Return whether operands of ``node`` are broadcast to its result and combined element by
    element."""
    row = row_of(node)
    # The tag counts in addition to a separate row: such a row may refuse, but never contradict it.
    tagged = row is not None and torch.Tag.pointwise in node.target.tags
    return tagged or (row is not None and row.factors is elementwise.pointwise)


def record_factors(node: Node) -> None:
    """Compare the open sizes of ``node`` as its rule compared the example's, so that calls for
    which the comparisons differ are recognised."""
    row = row_of(node)
    if row is not None and row.factors is views.reshape:
        # The rule sorts the example's cuts; open ones cannot be sorted, only compared in pairs.
        record_cuts(*operand_shapes(node), *result_shapes(node))
    else:
        rule_for(node)


def has_local_arguments(node: Node) -> bool:
    """Return whether size arguments of ``node`` differ on a shard."""
    row = row_of(node)
    return row is not None and bool(row.local_arguments)


def local_call(
    call: LocalCall, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the operator and arguments with which one rank runs ``call``.

    Args:
        args, kwargs: those of the call, with one rank's operands.
    """
    target, row = call.node.target, row_of(call.node)
    if row is None:
        return target, tuple(args), kwargs
    if row.is_reshape(call):
        return torch.ops.aten.reshape.default, (args[0], list(call.result_shapes[0])), {}
    # All are replaced, also those that stay the same: sizes may be open, and comparing them here
    # would record a condition that the program does not depend on.
    args, kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(target._schema.arguments):
        if argument.name not in row.local_arguments or argument.name not in call.arguments:
            continue
        value = row.local_arguments[argument.name](call)
        # A default stays implicit. Compared only if plain integers, which are not open.
        if type(value) is int and value == call.arguments[argument.name]:
            continue
        if argument.kwarg_only or argument.name in kwargs:
            kwargs[argument.name] = value
            continue
        # Explicit up to this one: positional defaults before it cannot be left out.
        args += list(call.arguments.values())[len(args) : position + 1]
        args[position] = value
    return target, tuple(args), kwargs
