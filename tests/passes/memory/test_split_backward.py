"""A backward as two functions: what each computes, the text, the check, the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.check import check_partitioned
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import SplitBackward
from sp_compiler.ir.fx import ancestors
from sp_compiler.ops.communicator import Communicator
from sp_compiler.options import CompileOptions
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.reductions import DeferredGradients
from sp_compiler.runtime.weight_gradients import WeightGradients
from sp_compiler.trace.export import flatten_inputs
from tests.helpers.slow import slow
from tests.models import zoo


def _calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


@pytest.fixture(scope="module", params=[slow(1), 2])
def compiled(request: Any) -> CompiledProgram:
    options = CompileOptions(tp=request.param, split_backward=True, overlap=False)
    return build(zoo.build("gpt2", dropout=0.1), (), zoo.inputs("gpt2"), options)


def test_each_node_is_in_one_of_the_two(compiled: CompiledProgram) -> None:
    for region in compiled.regions.values():
        parts = region.partitioned
        first, second = _calls(parts.split.inputs), _calls(parts.split.weights)
        assert {n.name for n in first}.isdisjoint(n.name for n in second)
        assert len(first) + len(second) == len(_calls(parts.step_backward))


def test_products_of_weights_wait(compiled: CompiledProgram) -> None:
    """Of a block's 12 products in backward, those of its 4 weights; nothing that an input needs."""
    parts = compiled.regions["GPT2Block"].partitioned
    products = [n for n in _calls(parts.split.weights) if n.target is torch.ops.aten.mm.default]
    assert len(products) == 4
    results = parts.split.inputs.output_node().args[0]
    num_inputs = len(compiled.regions["GPT2Block"].region.input_kinds)
    needed = ancestors(node for node in results[:num_inputs] if node is not None)
    parts_of_others = {n for n in _calls(parts.split.inputs) if n not in needed}
    assert all(n.target.__name__ == "getitem" for n in parts_of_others)


def test_same_numbers(compiled: CompiledProgram) -> None:
    """Bit for bit, on one rank, for every region."""
    if compiled.world_size > 1:
        return
    tp = Communicator(None, 0, 1)
    torch.manual_seed(0)
    for name, region in compiled.regions.items():
        parts, code = region.partitioned, compiled.codes[name]
        like = [n.meta["val"] for n in parts.step_backward.find_nodes(op="placeholder")]
        values = [_random(value) for value in like]
        saved, tangents = values[: len(parts.saved)], values[len(parts.saved) :]
        loss: Any = compiled.loss_backwards.get(name)
        full = (code.backward if loss is None else loss.run)(tp, tuple(saved), *tangents)
        inputs, rest = code.backward_inputs(tp, tuple(saved), *tangents)  # type: ignore[attr-defined]
        weights = code.backward_weights(tp, rest)  # type: ignore[attr-defined]
        kinds = region.region.input_kinds
        for kind, whole, early, late in zip(kinds, full, inputs, weights, strict=True):
            now, never = (late, early) if kind == "param" else (early, late)
            assert never is None
            assert (now is None) == (whole is None)
            assert whole is None or torch.equal(now, whole)


def test_gradients_of_weights_come_when_they_are_taken(compiled: CompiledProgram) -> None:
    """The same as without waiting, twice where two backwards wait."""
    if compiled.world_size > 1:
        return
    model = zoo.build("gpt2", dropout=0.1)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    leaves, _ = flatten_inputs((), zoo.inputs("gpt2"))

    def backward(weights: WeightGradients | None) -> None:
        executor = Executor(compiled, Communicator(None, 0, 1), weights=weights)
        run = executor.run(params, buffers, leaves, torch.tensor(5))
        next(x for x in run.outputs if x.dim() == 0).backward()

    backward(None)
    expected = {name: parameter.grad for name, parameter in params.items()}
    model.zero_grad()
    weights = WeightGradients(DeferredGradients())
    for _ in range(2):
        backward(weights)
    assert all(parameter.grad is None for parameter in params.values())
    weights.take()()
    weights.take()()  # nothing is left of them
    for name, grad in expected.items():
        torch.testing.assert_close(params[name].grad, None if grad is None else 2 * grad)


def _random(like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.rand(like.shape, dtype=like.dtype) + 0.5
    return torch.ones(like.shape, dtype=like.dtype)


def test_the_check_sees_both(compiled: CompiledProgram) -> None:
    """A collective that is missing from either function is refused."""
    if compiled.world_size == 1:
        return
    region = compiled.regions["GPT2Block"]
    tangents = region.joint.tangent_outputs
    check_partitioned(region.region, region.partitioned, tangents, 2)
    whole = region.partitioned.split
    assert whole is not None
    for name in ("inputs", "weights"):
        graph = Graph()
        output = graph.graph_copy(getattr(whole, name), {}, True)  # type: ignore[arg-type]
        graph.output(output[0] if isinstance(output, tuple) and len(output) == 2 else output)
        convert = next(n for n in _calls(graph) if "convert" in str(n.target))
        convert.replace_all_uses_with(convert.args[0])
        graph.erase_node(convert)
        split = SplitBackward(
            graph if name == "inputs" else whole.inputs,
            graph if name == "weights" else whole.weights,
        )
        broken = replace(region.partitioned, split=split)
        with pytest.raises(PlacementError):
            check_partitioned(region.region, broken, tangents, 2)
