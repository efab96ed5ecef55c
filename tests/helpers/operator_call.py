"""One call of an operator: as a region, its true result, and every way to run it on parts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_iter, tree_map_only

from sp_compiler.base.placement import Segmentation
from sp_compiler.ir.fx import carries_gradient, tensor_operands
from sp_compiler.ir.op_traits import FUSED_ATTENTION
from sp_compiler.ir.program import RefKind, Region
from sp_compiler.passes.normalize.negative_dims import make_dims_negative
from sp_compiler.passes.sharding.dim_roles import results_of
from sp_compiler.rules.factors import Dims, Factor, OpRule
from sp_compiler.rules.padding import may_pad
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.table import rule_for
from sp_compiler.rules.vocabulary import vocabulary_strategies
from tests.helpers.regions import Reference


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, in which tensors are whole."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in tree_iter((self.args, self.kwargs)) if isinstance(x, Tensor)]

    @property
    def is_traced(self) -> bool:
        """Return whether only differentiation makes such calls, on one rank: never lowered."""
        name = self.target.__name__
        inner = name.startswith(("_euclidean_dist", "_embedding_bag_forward_only"))
        return inner or "backward" in name or self.target in FUSED_ATTENTION

    def on(self, tensors: Sequence[Any], **sizes: Any) -> Call:
        """The same call on other tensors and with other size arguments."""
        given = iter(tensors)
        args, kwargs = tree_map_only(Tensor, lambda _: next(given), (self.args, self.kwargs))
        names = [argument.name for argument in self.target._schema.arguments]
        args = [sizes.get(name, arg) for name, arg in zip(names, args, strict=False)]
        return Call(self.target, tuple(args), kwargs)


@dataclass(frozen=True)
class Whole:
    """A call as a region of whole tensors, and what it computes.

    Attributes:
        call: what it was made from.
        node: the operator in the region.
        outputs: its tensor results.
        tangents: a random gradient of each differentiable one, else ``None``.
        grads: gradient of each operand, ``None`` where there is none.
    """

    call: Call
    region: Region
    node: Node
    inputs: list[Tensor]
    outputs: list[Tensor]
    tangents: list[Tensor | None]
    grads: list[Tensor | None]

    @classmethod
    def of(cls, call: Call) -> Whole:
        region, node = region_of_call(call)
        leaves = [
            x.detach().requires_grad_(placeholder.meta["requires_grad"])
            for x, placeholder in zip(call.tensors, region.placeholders, strict=True)
        ]
        outputs = list(Reference(region.module).run(*leaves))
        generator = torch.Generator().manual_seed(1)
        tangents = [random_like(x, generator) if x.requires_grad else None for x in outputs]
        grads = gradients(outputs, tangents, leaves)
        return cls(call, region, node, call.tensors, [x.detach() for x in outputs], tangents, grads)


def region_of_call(call: Call) -> tuple[Region, Node]:
    graph, mode = Graph(), FakeTensorMode()
    schema = (argument.name for argument in call.target._schema.arguments)
    # Buffers of a module, for which torch's derivatives refuse to have one.
    statistics = [
        x for name, x in zip(schema, call.args, strict=False) if name.startswith("running_")
    ]

    def placeholder(value: Tensor) -> Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        node.meta["requires_grad"] = (
            not call.is_traced
            and value.is_floating_point()
            and not any(value is buffer for buffer in statistics)
        )
        return node

    args, kwargs = tree_map_only(Tensor, placeholder, (call.args, call.kwargs))
    node = graph.call_function(call.target, args, kwargs)
    fakes = tree_map_only(Node, lambda x: x.meta["val"], (args, kwargs))
    with mode:
        node.meta["val"] = call.target(*fakes[0], **fakes[1])
    node.meta["requires_grad"] = not call.is_traced
    results = [node]
    if isinstance(node.meta["val"], (tuple, list)):
        results = [
            graph.call_function(operator.getitem, (node, index))
            for index, value in enumerate(node.meta["val"])
            if isinstance(value, Tensor)
        ]
        for item in results:
            item.meta.update(val=node.meta["val"][item.args[1]], requires_grad=not call.is_traced)
    graph.output(results)
    if not call.is_traced:
        make_dims_negative(graph)
    names = tuple(found.name for found in graph.find_nodes(op="placeholder"))
    module = GraphModule(nn.Module(), graph, class_name="Operator")
    kinds: list[RefKind] = ["call"] * len(names)
    return Region("Operator", module, tuple(kinds), names), node


def offered(whole: Whole, world_size: int) -> list[Strategy]:
    """Every strategy that the rule of the operator offers in any graph around it."""
    node, rule = whole.node, rule_for(whole.node)
    num_operands, num_results = len(tensor_operands(node)), len(results_of(node))
    found: list[Strategy] = []
    for operand_rows, result_rows in _row_counts(rule):
        offers = Offers(
            world_size,
            lambda factor: True,
            lambda factor: _cuts(factor, world_size),
            operand_rows,
            result_rows,
            may_pad=lambda factor: (
                rule is not None
                and may_pad(node, rule, factor, lambda operand: operand.op == "placeholder")
            ),
        )
        found += strategies(rule, num_operands, num_results, offers)
    found += vocabulary_strategies(node, world_size, lambda dim: True)
    if whole.call.is_traced:
        found = [way for way in found if all(p.kind != "T" for p in way.operands)]
    of_numbers = [carries_gradient(x.meta["val"]) for x in tensor_operands(node)]
    return [
        way
        for way in dict.fromkeys(found)
        if all(p.kind != "P" or f for p, f in zip(way.operands, of_numbers, strict=True))
    ]


def _row_counts(rule: OpRule | None) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Number of leading dims of operands and results that may be tokens: of the same factors."""
    if rule is None:
        yield (), ()
        return
    yield (0,) * len(rule.operands), (0,) * len(rule.results)
    for count in range(1, max(map(len, rule.results), default=0) + 1):
        if any(len(dims) < count for dims in rule.results):
            return
        leading = [_leading(dims, count) for dims in rule.results]
        counts = [
            [c for c in range(len(dims) + 1) if c and _leading(dims, c) == leading[0]] or [0]
            for dims in rule.operands
        ]
        for operands in itertools.product(*counts):
            yield operands, (count,) * len(rule.results)


def _leading(dims: Dims, count: int) -> list[Factor]:
    return [factor for dim in dims[:count] for factor in dim]


def _cuts(factor: Factor, world_size: int) -> Sequence[Segmentation]:
    """Two equal segments and two unequal ones; elements, pairs and three units with padding."""
    size = factor.size
    cuts = [(size // 2, size // 2), (size // 3, 2 * (size // 3))]
    even = [cut for cut in cuts if sum(cut) == size and all(n % world_size == 0 for n in cut)]
    counts = [count for count in (size, size // 2, 3) if count and count % world_size]
    padded = [Segmentation((size,), count) for count in counts if not size % count]
    return [*map(Segmentation, even), *padded]


def gradients(
    outputs: Sequence[Tensor], tangents: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = [(x, grad) for x, grad in zip(outputs, tangents, strict=True) if grad is not None]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    roots, given = [x for x, _ in pairs], [grad for _, grad in pairs]
    try:
        found = iter(torch.autograd.grad(roots, wanted, given, allow_unused=True))
    except (RuntimeError, NotImplementedError) as error:
        if "derivative" not in str(error):
            raise
        return [None] * len(inputs)  # PyTorch has none
    return [next(found) if x.requires_grad else None for x in inputs]


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=generator)
