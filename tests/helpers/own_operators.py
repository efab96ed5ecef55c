"""One of our own operators, on simulated ranks, against a dense formula, with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor
from torch.fx import Node

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import Placement, as_value
from sp_compiler.check.derive import declared_strategies
from sp_compiler.ops.communicator import Communicator, running_on
from sp_compiler.ops.registry import Operator, operator_of
from sp_compiler.verification.simulate import simulated_ranks
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.one_operator import join, scatter

_TOLERANCE = 1e-12
_ONE_RANK = Communicator(None, 0, 1)


@dataclass(frozen=True)
class Case:
    """A call of ``operator``.

    Attributes:
        operator: under test.
        dense: what it stands for, a differentiable function of the global tensors.
        inputs: global tensors, float64 where they are floating point.
        rest: the arguments behind the tensors.
        operands: placements of the inputs.
        results: placements of the results.
    """

    operator: Operator
    dense: Callable[..., Any]
    inputs: Sequence[Tensor]
    rest: tuple[Any, ...]
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


def assert_right(case: Case, world_size: int) -> None:
    """Numbers, gradients, fakes and declared placements are right; both ways to call agree."""
    generator = torch.Generator().manual_seed(3)
    expected, expected_grads, tangents = _dense(case, generator)
    parts = [
        _scatter(x, placement, world_size, generator)
        for x, placement in zip(case.inputs, case.operands, strict=True)
    ]
    local_tangents = [
        None if grad is None else _scatter(grad, placement.dual, world_size, generator, zeros=True)
        for grad, placement in zip(tangents, case.results, strict=True)
    ]
    _assert_declared(case, parts, world_size)
    with simulated_ranks(world_size) as tp:
        given = [part.clone() for part in parts]  # which the kernel may write into
        called = _results(
            getattr(tp, case.operator.name)(*case.operator.method_arguments((*given, *case.rest)))
        )
        leaves = [part.clone().requires_grad_(part.is_floating_point()) for part in parts]
        with running_on(tp):
            results = _results(case.operator.overload(*leaves, *case.rest))
        for result, same, placement in zip(results, called, case.results, strict=True):
            assert torch.equal(_join(result, placement), _join(same, placement))
        grads = _gradients(case, results, local_tangents, leaves)
    for result, true, placement in zip(results, expected, case.results, strict=True):
        torch.testing.assert_close(_join(result, placement), true, rtol=_TOLERANCE, atol=_TOLERANCE)
    for grad, true_grad, placement in zip(grads, expected_grads, case.operands, strict=True):
        if true_grad is not None:
            assert grad is not None
            joined = _join(grad, placement.dual)
            # Not a number where torch's own gradient is none: of a row without a finite logit.
            torch.testing.assert_close(
                joined, true_grad, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
            )


def assert_registered(operator: Operator, *args: Any) -> None:
    """Torch, the communicator and the registry have the same operator.

    Args:
        operator: under test.
        args: of its schema, for one rank; what it is differentiated for requires a gradient.
    """
    with pytest.raises(UnsupportedError, match=f"sp_compiler::{operator.name} depends on the rank"):
        operator.overload(*args)
    with running_on(_ONE_RANK):
        torch.library.opcheck(operator.overload, args)
        results = _results(operator.overload(*args))
    # The kernel may return its argument; what torch's dispatcher returns is always a result's own.
    owned = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    assert owned.isdisjoint(x.untyped_storage().data_ptr() for x in results)
    kernel = getattr(_ONE_RANK, operator.name)
    for result, same in zip(
        results, _results(kernel(*operator.method_arguments(args))), strict=True
    ):
        assert torch.equal(result, same)
    assert operator_of(operator.overload) is operator
    arguments = operator.overload._schema.arguments
    required = [each for each in arguments if not each.has_default_value()]
    assert required[-1].name == "world_size"


def node_of(operator: Operator, shapes: Sequence[Tensor], rest: tuple[Any, ...]) -> Node:
    """A call in a graph on values shaped like ``shapes``."""
    builder = GraphBuilder()
    inputs = [builder.input(f"x{i}", *x.shape, dtype=x.dtype) for i, x in enumerate(shapes)]
    return builder.call(operator.overload, *inputs, *rest)


def _dense(
    case: Case, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
    """Results, gradients of the inputs, and the tangents that gave them."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
    results = _results(case.dense(*leaves))
    tangents = [
        torch.randn(x.shape, dtype=x.dtype, generator=generator) if x.requires_grad else None
        for x in results
    ]
    grads = _gradients(case, results, tangents, leaves)
    return [x.detach() for x in results], grads, tangents


def _gradients(
    case: Case,
    results: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
) -> list[Tensor | None]:
    pairs = [(x, grad) for x, grad in zip(results, tangents, strict=True) if grad is not None]
    if case.operator.gradient is None or not pairs:
        return [None] * len(leaves)
    torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
    return [x.grad for x in leaves]


def _assert_declared(case: Case, parts: Sequence[Tensor], world_size: int) -> None:
    """The checks accept the placements, and the fake has the shapes of one rank's result."""
    node = node_of(case.operator, [_part(x) for x in parts], case.rest)

    def valued(placements: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(as_value(placement, world_size) for placement in placements)

    typing = (valued(case.operands), valued(case.results))
    ways = declared_strategies(node, world_size)
    assert ways is not None
    declared = [(valued(way.operands), valued(way.results)) for way in ways]
    assert typing in declared
    with simulated_ranks(world_size) as tp, running_on(tp):
        results = _results(case.operator.overload(*parts, *case.rest))
    for fake, result in zip(_results(node.meta["val"]), results, strict=True):
        assert fake.shape == _part(result).shape
        assert fake.dtype == result.dtype


def _results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _part(x: Tensor) -> Tensor:
    return x._local_tensors[0] if isinstance(x, LocalTensor) else x


def _scatter(
    x: Tensor,
    placement: Placement,
    world_size: int,
    generator: torch.Generator,
    *,
    zeros: bool = False,
) -> Tensor:
    if world_size == 1:
        return x.clone()
    return scatter(x, placement, world_size, generator, zeros=zeros)


def _join(local: Tensor, placement: Placement) -> Tensor:
    return join(local, placement, ()) if isinstance(local, LocalTensor) else local.detach()
