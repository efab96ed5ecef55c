"""One operator under one strategy: its parts on simulated ranks against the whole operator."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import LocalTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_iter, tree_map_only

from sp_compiler.base.placement import Placement, R, S, as_value
from sp_compiler.base.shards import join_parts, local_part
from sp_compiler.check import check_forward, check_partitioned
from sp_compiler.check.derive import derive
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.op_traits import FUSED_ATTENTION
from sp_compiler.ir.program import RefKind, Region
from sp_compiler.ops.communicator import Communicator
from sp_compiler.passes.compile_region import compile_region
from sp_compiler.passes.normalize.negative_dims import make_dims_negative
from sp_compiler.passes.sharding.dim_roles import RegionValues, results_of
from sp_compiler.passes.sharding.rewrite import RegionLowering, local_placement
from sp_compiler.rules.factors import Dims, Factor, OpRule
from sp_compiler.rules.padding import may_pad
from sp_compiler.rules.registry import LocalCall
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.table import row_of, rule_for
from sp_compiler.rules.vocabulary import vocabulary_strategies
from sp_compiler.verification.simulate import simulated_ranks
from tests.helpers.regions import Reference

TOLERANCE = 1e-10


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
        """Whether only differentiation makes such calls, on one rank's parts: never lowered."""
        return "backward" in self.target.__name__ or self.target in FUSED_ATTENTION

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
        region, node = _region(call)
        leaves = [
            x.detach().requires_grad_(placeholder.meta["requires_grad"])
            for x, placeholder in zip(call.tensors, region.placeholders, strict=True)
        ]
        outputs = list(Reference(region.module).run(*leaves))
        generator = torch.Generator().manual_seed(1)
        tangents = [_random_like(x, generator) if x.requires_grad else None for x in outputs]
        grads = _gradients(outputs, tangents, leaves)
        return cls(call, region, node, call.tensors, [x.detach() for x in outputs], tangents, grads)


def _region(call: Call) -> tuple[Region, Node]:
    graph, mode = Graph(), FakeTensorMode()

    def placeholder(value: Tensor) -> Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        node.meta["requires_grad"] = not call.is_traced and value.is_floating_point()
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
            may_pad=lambda factor: may_pad(node, lambda operand: operand.op == "placeholder"),
        )
        found += strategies(rule, num_operands, num_results, offers)
    found += vocabulary_strategies(node, world_size)
    if whole.call.is_traced:
        found = [way for way in found if all(p.kind != "T" for p in way.operands)]
    floating = [x.meta["val"].is_floating_point() for x in tensor_operands(node)]
    return [
        way
        for way in dict.fromkeys(found)
        if all(p.kind != "P" or f for p, f in zip(way.operands, floating, strict=True))
    ]


def _row_counts(rule: OpRule | None) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """How many leading dims of operands and results may be tokens: those of the same factors."""
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


def _cuts(factor: Factor, world_size: int) -> Sequence[tuple[int, ...]]:
    """Two equal segments and two unequal ones."""
    cuts = [(factor.size // 2, factor.size // 2), (factor.size // 3, 2 * (factor.size // 3))]
    return [
        cut for cut in cuts if sum(cut) == factor.size and all(n % world_size == 0 for n in cut)
    ]


Run = Callable[[Communicator, list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""Outputs and gradients of a sharded region from its inputs and tangents."""
Step = Callable[[Region, int], Run]


def check(whole: Whole, strategy: Strategy, world_size: int, step: Step | None = None) -> None:
    """Compare the operator on its parts with the whole one.

    Raises:
        AssertionError: a wrong number.
        SPCompilerError: shapes or placements that do not go together, or ranks that disagree.
    """
    prepare = _traced_step if whole.call.is_traced else _lowered_step
    run = prepare(whole, strategy, world_size, step)
    generator = torch.Generator().manual_seed(2)
    # Weights have zeros in their padding, other operands anything.
    is_linear = whole.call.target is torch.ops.aten.linear.default
    inputs = [
        scatter(x, placement, world_size, generator, zeros=is_linear and position > 0)
        for position, (x, placement) in enumerate(zip(whole.inputs, strategy.operands, strict=True))
    ]
    tangents = [
        None if x is None else scatter(x, placement.dual, world_size, generator, zeros=True)
        for x, placement in zip(whole.tangents, strategy.results, strict=False)
    ]
    with simulated_ranks(world_size) as tp:
        outputs, grads = run(tp, inputs, tangents)
    # Results that a rule leaves out are whole.
    results = (*strategy.results, *[R] * (len(whole.outputs) - len(strategy.results)))
    true = (*whole.outputs, *whole.grads)
    kept = (*results, *(placement.dual for placement in strategy.operands))
    shapes = [tuple(x.shape) for x in (*whole.outputs, *whole.inputs)]
    for mine, expected, placement, shape in zip(
        (*outputs, *grads), true, kept, shapes, strict=True
    ):
        if expected is None:
            assert mine is None or not join(mine, placement, shape).any()
            continue
        found = torch.zeros_like(expected) if mine is None else join(mine, placement, shape)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def lower(whole: Whole, strategy: Strategy, world_size: int) -> Region:
    """The region of one rank, its inputs and outputs placed as the strategy places them."""
    node = whole.node
    facts = RegionValues(rules={node: rule_for(node)})
    values = [(placeholder, 0) for placeholder in whole.region.placeholders]
    facts.active.update(dict.fromkeys([*values, *results_of(node)]))
    chosen = {node: strategy}
    inputs, outputs = list(strategy.operands), list(strategy.results)
    return RegionLowering(whole.region, facts.active, chosen, inputs, outputs, world_size).run()


def _lowered_step(whole: Whole, strategy: Strategy, world_size: int, step: Step | None) -> Run:
    """The operator as sharding lowers it; what the table offers, both checkers accept."""
    region = lower(whole, strategy, world_size)
    check_forward(region, world_size)
    for node in region.module.graph.nodes:
        if node.name == whole.node.name:
            _check_derived(node, strategy, world_size)
    if step is None:
        step = compiled_step if _is_opaque(region) else eager_step
    return step(region, world_size)


def _traced_step(whole: Whole, strategy: Strategy, world_size: int, step: Step | None) -> Run:
    """The operator called on parts; sizes among its arguments are those of its results."""
    local = [
        p.local_shape(tuple(x.shape), world_size) if p.is_sharded else tuple(x.shape)
        for x, p in zip(whole.outputs, strategy.results, strict=False)
    ]
    parts = [
        local_part(x, p, 0, world_size)
        for x, p in zip(whole.inputs, strategy.operands, strict=True)
    ]
    sizes = _local_sizes(whole, parts, strategy, local, world_size)
    _check_derived(_region(whole.call.on(parts, **sizes))[1], strategy, world_size)

    def run(
        tp: Communicator, inputs: list[Any], tangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        call = whole.call.on(inputs, **sizes)
        results = call.target(*call.args, **call.kwargs)
        results = results if isinstance(results, (tuple, list)) else [results]
        return [x for x in results if isinstance(x, Tensor)], [None] * len(inputs)

    return run


def _local_sizes(
    whole: Whole,
    parts: Sequence[Tensor],
    strategy: Strategy,
    results: Sequence[tuple[int, ...]],
    world_size: int,
) -> dict[str, Any]:
    """Size arguments of one rank's call, as its row has them."""
    row = row_of(whole.node)
    if row is None:
        return {}
    local = dict(zip(tensor_operands(whole.node), parts, strict=True))
    graph = Graph()

    def part(node: Node) -> Node:
        new = graph.placeholder(node.name)
        new.meta["val"] = local[node]
        return new

    values = tree_map_only(Node, part, arguments(whole.node))
    call = LocalCall(
        whole.node, values, strategy.operands, strategy.results, tuple(results), world_size
    )
    return {name: of(call) for name, of in row.local_arguments.items()}


def _check_derived(node: Node, strategy: Strategy, world_size: int) -> None:
    operands, results = (
        tuple(as_value(local_placement(placement)) for placement in placements)
        for placements in (strategy.operands, strategy.results)
    )
    found = [derived[: len(results)] for derived in derive(node, operands, world_size)]
    assert results in found, f"{node.format_node()}: {operands} -> {results} is refused"


def _is_opaque(region: Region) -> bool:
    return any(
        getattr(node.target, "namespace", "") == "sp_compiler" for node in region.module.graph.nodes
    )


def eager_step(region: Region, world_size: int) -> Run:
    """Node by node, differentiated by autograd."""

    def run(
        tp: Communicator, inputs: list[Any], tangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        leaves = [
            x.requires_grad_(placeholder.meta["requires_grad"])
            for x, placeholder in zip(inputs, region.placeholders, strict=True)
        ]
        outputs = list(fx.Interpreter(region.module).run(*leaves))
        return outputs, _gradients(outputs, tangents, leaves)

    return run


def compiled_step(region: Region, world_size: int) -> Run:
    """The generated code, as it would run in a model."""
    compiled = compile_region(region, recompute="none")
    flows = compiled.differentiable
    check_partitioned(
        compiled.region, compiled.partitioned, compiled.joint.tangent_outputs, world_size
    )

    def run(
        tp: Communicator, inputs: list[Any], tangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        with torch.no_grad():
            outputs, saved = compiled.code.forward(tp, *inputs)
            used = [x for x, flow in zip(tangents, flows, strict=True) if flow]
            backward = compiled.code.backward if used else None
            grads = list(backward(tp, saved, *used)) if backward else [None] * len(inputs)
        return list(outputs), grads

    return run


def _gradients(
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


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=generator)


def scatter(
    x: Tensor,
    placement: Placement,
    world_size: int,
    generator: torch.Generator,
    *,
    zeros: bool = False,
) -> Tensor:
    """One part a rank. All parts of a sum are dense; padding is 0 or anything."""
    if placement.kind == "P" and x.is_floating_point():
        parts = [_random_like(x, generator) for _ in range(world_size - 1)]
        parts.append(x - sum(parts))
        return LocalTensor(dict(enumerate(parts)))
    if placement.kind == "T":
        x = x.reshape(math.prod(x.shape[: placement.dim]), *x.shape[placement.dim :])
        padding = x[-1:].expand(-len(x) % world_size, *x.shape[1:])
        x = torch.cat([x, torch.zeros_like(padding) if zeros else padding])
        placement = local_placement(placement)
    if placement.padding(world_size) and not zeros:
        padding = x.narrow(placement.dim, 0, 1)
        padding = padding.repeat_interleave(placement.padding(world_size), placement.dim)
        x, placement = torch.cat([x, padding], placement.dim), S(placement.dim)
    return LocalTensor(
        {rank: local_part(x, placement, rank, world_size) for rank in range(world_size)}
    )


def join(local: Tensor, placement: Placement, shape: tuple[int, ...]) -> Tensor:
    """The whole value, without padding."""
    assert isinstance(local, LocalTensor)
    parts = [local._local_tensors[rank].detach() for rank in sorted(local._ranks)]
    whole = join_parts(parts, local_placement(placement))
    if placement.kind == "T":
        return whole[: math.prod(shape[: placement.dim])].reshape(shape)
    return whole
