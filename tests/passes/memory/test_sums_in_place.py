"""Gradients of a parameter that are summed in place: what is rewritten, what is not, numbers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from sp_compiler.ir.fx import calls
from sp_compiler.ops.accumulate import ADD_PART, ADD_PRODUCT
from sp_compiler.ops.communicator import running_on
from sp_compiler.passes.memory.partition import PartitionOptions, partition
from sp_compiler.passes.memory.split_backward import split_backward
from sp_compiler.passes.memory.sums_in_place import sum_in_place
from sp_compiler.passes.memory.tag import tag_recompute
from tests.helpers.compiled_region import differentiate
from tests.helpers.graph_builder import GraphBuilder, convert
from tests.helpers.regions import TP1, random_inputs, region_of

aten = torch.ops.aten


def lines(graph: Graph) -> list[str]:
    """A line for each call: name, operator, operands."""
    return [
        f"{node.name} = {node.target.__name__.partition('.')[0]}{node.args}"
        for node in graph.nodes
        if node.op == "call_function"
    ]


def products(b: GraphBuilder, count: int) -> list[Node]:
    """Gradients of a weight of (3, 4), transposed, as those of a linear layer are."""
    found = []
    for index in range(count):
        left, right = b.input(f"g{index}", 4, 5), b.input(f"x{index}", 5, 3)
        product = b.call(aten.mm.default, left, right, name=f"mm_{index}")
        found.append(b.call(aten.t.default, product, name=f"t_{index}"))
    return found


def total(b: GraphBuilder, parts: Sequence[Node], *rest: Any) -> Node:
    result = parts[0]
    for index, part in enumerate(parts[1:]):
        result = b.call(aten.add.Tensor, result, part, *rest, name=f"sum_{index}")
    return result


def run(graph: Graph) -> Tensor:
    """The first result of ``graph`` on random numbers of float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    with running_on(TP1):
        (result, *_) = fx.GraphModule({}, graph)(*inputs)
    assert isinstance(result, Tensor)
    return result


def test_products_are_accumulated() -> None:
    """Of three, each in turn; the view behind the sum was one behind every product."""
    b = GraphBuilder()
    grad = total(b, products(b, 3))
    graph = b.output(grad, None)
    expected = run(graph)
    sum_in_place(graph, [grad], 1)
    assert lines(graph) == [
        "mm_1 = mm(g1, x1)",
        "sum_2 = add_product(mm_1, g0, x0, 1)",
        "sum_3 = add_product(sum_2, g2, x2, 1)",
        "t_3 = t(sum_3,)",
    ]
    result = graph.output_node().args[0][0].meta["val"]
    assert (result.shape, result.stride()) == ((3, 4), (1, 3))
    assert float((run(graph) - expected).abs().max()) <= 1e-15 * float(expected.abs().max())


def test_what_is_no_product_is_added() -> None:
    """Products of experts, to the bit."""
    b = GraphBuilder()
    each = [
        b.call(aten.bmm.default, b.input(f"g{index}", 2, 4, 5), b.input(f"x{index}", 2, 5, 3))
        for index in range(2)
    ]
    grad = total(b, [b.call(aten.transpose.int, product, 1, 2) for product in each])
    graph = b.output(grad)
    expected = run(graph)
    sum_in_place(graph, [grad], 1)
    assert lines(graph) == [
        "bmm_default = bmm(g0, x0)",
        "bmm_default_1 = bmm(g1, x1)",
        "sum_1 = add_part(bmm_default_1, bmm_default, 1)",
        "transpose_int_2 = transpose(sum_1, 1, 2)",
    ]
    assert torch.equal(run(graph), expected)


def test_the_summand_that_may_be_is_written() -> None:
    """A saved tensor and a product that is read again are added, and views that only one has."""
    b = GraphBuilder()
    saved, x = b.input("saved", 4, 4), b.input("x", 4, 4)
    own = b.call(aten.exp.default, x, name="own")
    again = b.call(aten.mm.default, x, x, name="again")
    view = b.call(aten.view.default, b.call(aten.exp.default, saved, name="e"), [4, 4], name="view")
    grad = total(b, [saved, own, again, view])
    graph = b.output(grad, again)
    sum_in_place(graph, [grad], 1)
    assert lines(graph)[-3:] == [
        "sum_3 = add_part(own, saved, 1)",
        "sum_4 = add_part(sum_3, again, 1)",
        "sum_5 = add_part(view, sum_4, 1)",
    ]


@pytest.mark.parametrize("added", [False, True])
def test_views_that_only_look_alike_stay(added: bool) -> None:
    """Of values of other shapes, and sums in place to which the same was added."""
    b = GraphBuilder()
    sizes = ((3, 3), (1, 9))
    parts = [
        b.call(aten.mm.default, b.input(f"g{rows}", rows, 4), b.input(f"x{rows}", 4, columns))
        for rows, columns in sizes
    ]
    parts = [b.call(aten.view.default, part, [9]) for part in parts]
    if added:
        same = b.input("same", 9)
        parts = [b.call(aten.add.Tensor, part, same) for part in parts]
    grad = total(b, parts)
    graph = b.output(grad)
    expected = run(graph)
    sum_in_place(graph, [grad], 1)
    assert _in_place(graph) == ["add_part"] * (3 if added else 1)
    assert torch.allclose(run(graph), expected, rtol=1e-14)


def _read_elsewhere(b: GraphBuilder) -> Sequence[Node]:
    first, second = (part.args[0] for part in products(b, 2))
    return total(b, [first, second]), first, second


def _sum_read_elsewhere(b: GraphBuilder) -> Sequence[Node]:
    grad = total(b, products(b, 2))
    return grad, b.call(aten.mul.Tensor, grad, 2)


def _view_read_elsewhere(b: GraphBuilder) -> Sequence[Node]:
    grad = b.call(aten.t.default, total(b, products(b, 2)))
    return grad, b.call(aten.mul.Tensor, grad, 2)


def _of_another_dtype(b: GraphBuilder) -> Sequence[Node]:
    pairs = (("a", torch.float32), ("b", torch.float64))
    return (total(b, [b.call(aten.exp.default, b.input(x, 3, dtype=dtype)) for x, dtype in pairs]),)


def _in_another_layout(b: GraphBuilder) -> Sequence[Node]:
    (first,) = products(b, 1)
    return (total(b, [b.call(aten.exp.default, b.input("y", 3, 4)), first]),)


def _scaled(b: GraphBuilder) -> Sequence[Node]:
    grad = b.graph.create_node("call_function", aten.add.Tensor, (*products(b, 2),), {"alpha": 2})
    grad.meta["val"] = grad.args[0].meta["val"]
    return (grad,)


def _saved(b: GraphBuilder) -> Sequence[Node]:
    views = [b.call(aten.view.default, b.input(name, 12), [3, 4]) for name in "ab"]
    return (total(b, views),)


def _expanded(b: GraphBuilder) -> Sequence[Node]:
    rows = [b.call(aten.sum.dim_IntList, b.input(name, 5, 4), [0], True) for name in "ab"]
    return (total(b, [b.call(aten.expand.default, row, [3, 4]) for row in rows]),)


def _of_something_larger(b: GraphBuilder) -> Sequence[Node]:
    larger = [b.call(aten.exp.default, b.input(name, 6, 4)) for name in "ab"]
    return (total(b, [b.call(aten.slice.Tensor, each, 0, 0, 3) for each in larger]),)


def _recomputed(b: GraphBuilder) -> Sequence[Node]:
    each = [b.call(aten.exp.default, b.input(name, 3, 4)) for name in "ab"]
    for node in each:
        node.meta["recomputed"] = True
    return (total(b, each),)


def _of_several_results(b: GraphBuilder) -> Sequence[Node]:
    norms = [b.call(aten.native_layer_norm.default, b.input(name, 3, 4), [4], None, None, 1.0)
             for name in "ab"]  # fmt: skip
    return (total(b, [b.call(operator.getitem, norm, 0) for norm in norms]),)


def _copied(b: GraphBuilder) -> Sequence[Node]:
    """Of a dim of size 1 the code of the copies, ``contiguous()``, returns their operands."""
    copies = []
    for name in "ab":
        turned = b.call(aten.transpose.int, b.input(name, 1, 3), 0, 1)
        copy = b.graph.create_node(
            "call_function", aten.clone.default, (turned,),
            {"memory_format": torch.contiguous_format},
        )  # fmt: skip
        copy.meta["val"] = turned.meta["val"].clone(memory_format=torch.contiguous_format)
        copies.append(copy)
    return (total(b, copies),)


def _arrived(b: GraphBuilder) -> Sequence[Node]:
    sent = [b.call(aten.exp.default, b.input(name, 6, 4)) for name in "ab"]
    return (total(b, [b.call(convert, each, "P", "S(0)", 2) for each in sent]),)


def _twice_the_same(b: GraphBuilder) -> Sequence[Node]:
    (only,) = products(b, 1)
    return (total(b, [only, only]),)


NEAR_MISSES: dict[str, Callable[[GraphBuilder], Sequence[Node]]] = {
    "summands that are read elsewhere": _read_elsewhere,
    "a sum that is read elsewhere": _sum_read_elsewhere,
    "a view of the sum that is read elsewhere": _view_read_elsewhere,
    "a sum that widens": _of_another_dtype,
    "another layout": _in_another_layout,
    "a scaled summand": _scaled,
    "saved tensors": _saved,
    "expanded gradients": _expanded,
    "parts of larger ones": _of_something_larger,
    "forward values": _recomputed,
    "one of several results": _of_several_results,
    "results of collectives": _arrived,
    "copies": _copied,
    "twice the same": _twice_the_same,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_stays_as_it_is(name: str) -> None:
    b = GraphBuilder()
    results = NEAR_MISSES[name](b)
    graph = b.output(*results)
    before = lines(graph)
    sum_in_place(graph, results[:1], 1)
    assert lines(graph) == before


def test_gradients_of_others_stay_as_they_are() -> None:
    b = GraphBuilder()
    grad, other = total(b, products(b, 2)), b.call(aten.exp.default, b.input("y", 3))
    graph = b.output(grad, other)
    before = lines(graph)
    sum_in_place(graph, [other], 1)
    assert lines(graph) == before


class _Shared(nn.Module):
    """A layer that runs twice; with a second output behind the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.up(x))
        return y, F.gelu(self.up(y))


def _region() -> Any:
    return region_of(_Shared(), torch.zeros(3, 4, dtype=torch.float64))


def _in_place(graph: Graph | None) -> list[str]:
    assert graph is not None
    ours = calls(graph, ADD_PRODUCT.overload, ADD_PART.overload)
    return [node.target.__name__.partition(".")[0] for node in ours]


def test_a_backward_of_the_loss_alone() -> None:
    """From the first output the second use has no gradient: nothing is left to add."""
    joint = differentiate(_region())
    tag_recompute(joint, "none")
    parts = partition(joint, PartitionOptions(loss_output=0))
    assert _in_place(parts.backward) == ["add_part", "add_product"]
    assert parts.loss is not None
    assert _in_place(parts.loss.backward) == []
    assert aten.add.Tensor not in {node.target for node in parts.loss.backward.nodes}


def test_numbers_and_halves_of_a_backward() -> None:
    """Pipelines have gradients of weights in a function of their own."""
    region = _region()
    joint = differentiate(region)
    tag_recompute(joint, "none")
    parts = partition(joint)
    split = split_backward(parts, region.input_kinds).split
    assert split is not None
    assert _in_place(split.inputs) == []
    assert _in_place(split.weights) == _in_place(parts.backward)
    inputs = random_inputs(region)
    module = fx.GraphModule({}, copy.deepcopy(region.module.graph))
    outputs = module(*inputs)
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    with torch.no_grad(), running_on(TP1):
        results = fx.GraphModule({}, parts.forward)(*inputs)
        given = [*results[parts.num_outputs :], *map(torch.ones_like, outputs)]
        of_inputs = fx.GraphModule({}, split.inputs)(*given)
        of_weights = fx.GraphModule({}, split.weights)(*of_inputs[len(inputs) :])
    largest = max(float(x.grad.abs().max()) for x in inputs)
    for x, first, second in zip(inputs, of_inputs, of_weights, strict=False):
        grad = second if first is None else first
        assert float((grad - x.grad).abs().max()) <= 1e-15 * largest
