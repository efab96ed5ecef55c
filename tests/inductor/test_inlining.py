"""Placed operators in graphs for Inductor: their kernels, traced once for equal calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

from sp_compiler.inductor.fused import Fused, TracingRank
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.counter import Grid
from sp_compiler.ops.registry import OPERATORS
from tests.helpers.inductor import fused

Function = Callable[[Communicator, Tensor, Tensor], Tensor]


def _operators(function: Function) -> list[tuple[object, str]]:
    """Target and arguments of each node; other nodes as their numbers."""
    traced = fused(function, [torch.ones(4, 6), torch.tensor(7)])._traced
    assert traced is not None
    number = {node: f"%{i}" for i, node in enumerate(traced.module.graph.nodes)}
    operators = [node for node in number if node.op == "call_function"]
    return [(x.target, repr(map_arg((x.args, x.kwargs), number.__getitem__))) for x in operators]


# Of x, a seed and the placement: sharded along dim 1 over 2 ranks.
CALLS: dict[str, Callable[..., Tensor]] = {
    "dropout": lambda kernel, x, seed: kernel(x, seed, 0.1, 3, 1, 2),
    "dropout_mask": lambda kernel, x, seed: kernel(x, seed, 0.1, 3, 1, 2),
    "uniform": lambda kernel, x, seed: kernel(seed, [4, 6], torch.float32, 3, 1, 2),
}


def test_there_is_a_call_of_every_placed_operator() -> None:
    assert set(CALLS) == {each.name for each in OPERATORS.values() if each.placed}


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_is_that_of_a_trace_through_the_kernel(name: str) -> None:
    call, kernel = CALLS[name], OPERATORS[name].kernel
    inlined = _operators(lambda tp, x, seed: call(getattr(tp, name), x + 1, seed) * 2)
    through = _operators(lambda tp, x, seed: call(partial(kernel, tp), x + 1, seed) * 2)
    assert inlined == through
    assert not [target for target, _ in inlined if "sp_compiler" in str(target)]


def test_results_of_equal_calls_are_two_tensors() -> None:
    """Two results of one trace are told apart by a function that is given both."""

    def forward(tp: Communicator, x: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(x.relu(), seed, 0.1, 3, 1, 2)

    def backward(tp: Communicator, grad: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(grad.neg(), seed, 0.1, 3, 1, 2)

    product = Fused(lambda tp, x, grad: (x * grad).sum(0))
    mode = FakeTensorMode()
    with mode:
        rank = TracingRank(torch.zeros((), dtype=torch.int64), 2)
        x, seed = torch.empty(4, 6), torch.zeros((), dtype=torch.int64)
        results = [Fused(function)(rank, x, seed) for function in (forward, backward)]
        assert len({each.untyped_storage()._cdata for each in results}) == 2
        product(rank, *results)
    assert product._traced is not None
    x, grad = torch.randn(2, 4, 6, dtype=torch.float64)
    assert torch.equal(product._traced.module(x, grad)[0], (x * grad).sum(0))


@pytest.mark.parametrize("name", CALLS)
def test_a_view_of_a_result_has_its_memory(name: str) -> None:
    """Inductor reads off fake tensors what it may write in place."""
    call = CALLS[name]

    def function(tp: Communicator, x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        first, second = (call(getattr(tp, name), x + i, seed) for i in range(2))
        return first, first.t(), second, second.t()

    traced = fused(function, [torch.ones(4, 6), torch.tensor(7)])._traced
    assert traced is not None
    first, first_view, second, second_view = (x.untyped_storage()._cdata for x in traced.results)
    assert (first, second) == (first_view, second_view)
    assert first != second


def _traces(*functions: Function, shape: tuple[int, ...] = (4, 6)) -> int:
    """How often the kernel is traced for ``functions``."""
    mode, count = FakeTensorMode(), mock.Mock()

    def hash_all(grid: Grid, original: Callable[[Grid], Tensor] = Grid.hash_all) -> Tensor:
        count()
        return original(grid)

    with mode, mock.patch.object(Grid, "hash_all", hash_all):
        rank = TracingRank(torch.zeros((), dtype=torch.int64), 2)
        x, seed = torch.empty(shape), torch.zeros((), dtype=torch.int64)
        for function in functions:
            result = Fused(function)(rank, x, seed)
            assert result.shape == shape
    return count.call_count


def test_equal_calls_share_a_trace() -> None:
    def forward(tp: Communicator, x: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(tp.dropout(x, seed, 0.1, 3, 1, 2), seed, 0.1, 3, 1, 2)

    def backward(tp: Communicator, grad: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(grad.relu(), seed, 0.1, 3, 1, 2)

    def other_site(tp: Communicator, x: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(x, seed, 0.1, 4, 1, 2)

    def other_layout(tp: Communicator, x: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(x.t().contiguous().t(), seed, 0.1, 3, 1, 2)

    assert _traces(forward, backward) == 1
    assert _traces(forward, backward, other_site) == 2
    assert _traces(forward, other_layout) == 2
