"""One operator under one strategy: its parts on simulated ranks against the whole operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed._local_tensor import LocalTensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from sp_compiler.base.placement import Placement, R, S, as_value
from sp_compiler.base.shards import join_parts, local_part
from sp_compiler.check import check_forward, check_partitioned
from sp_compiler.check.derive import derive
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.program import Region
from sp_compiler.ops.communicator import Communicator
from sp_compiler.passes.sharding.dim_roles import RegionValues, results_of
from sp_compiler.passes.sharding.rewrite import RegionLowering, local_placement
from sp_compiler.rules.registry import LocalCall
from sp_compiler.rules.strategies import Strategy
from sp_compiler.rules.table import row_of, rule_for
from sp_compiler.verification.simulate import simulated_ranks
from tests.helpers.compiled_region import compile_region
from tests.helpers.operator_call import Whole, gradients, random_like, region_of_call

TOLERANCE = 1e-10


Run = Callable[[Communicator, list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""Outputs and gradients of a sharded region from its inputs and tangents."""
Step = Callable[[Region, int], Run]
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.matmul.default)


def check(whole: Whole, strategy: Strategy, world_size: int, step: Step | None = None) -> None:
    """Compare the operator on its parts with the whole one.

    Raises:
        AssertionError: a wrong number.
        SPCompilerError: shapes or placements that do not go together, or ranks that disagree.
    """
    prepare = _traced_step if whole.call.is_traced else _lowered_step
    run = prepare(whole, strategy, world_size, step)
    generator = torch.Generator().manual_seed(2)
    inputs = [
        scatter(x, placement, world_size, generator, zeros=_is_zero(whole, position, placement))
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
    for actual, expected, placement, shape in zip(
        (*outputs, *grads), true, kept, shapes, strict=True
    ):
        if expected is None:
            assert actual is None or not join(actual, placement, shape).any()
            continue
        found = torch.zeros_like(expected) if actual is None else join(actual, placement, shape)
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
    _check_derived(region_of_call(whole.call.on(parts, **sizes))[1], strategy, world_size)

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
        tuple(as_value(local_placement(placement), world_size) for placement in placements)
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
        return outputs, gradients(outputs, tangents, leaves)

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


def _is_zero(whole: Whole, position: int, placement: Placement) -> bool:
    """Weights have zeros in their padding, other operands anything."""
    if whole.call.target in _PRODUCTS:  # the dim that is summed, where it may be padded
        return position == 1 and placement.dim == whole.inputs[1].dim() - 2
    return whole.call.target is torch.ops.aten.linear.default and position > 0


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
        parts = [random_like(x, generator) for _ in range(world_size - 1)]
        parts.append(x - sum(parts))
        return LocalTensor(dict(enumerate(parts)))
    if placement.kind == "T":
        x = x.reshape(math.prod(x.shape[: placement.dim]), *x.shape[placement.dim :])
        padding = x[-1:].expand(-len(x) % world_size, *x.shape[1:])
        x = torch.cat([x, torch.zeros_like(padding) if zeros else padding])
        placement = local_placement(placement)
    if placement.padding(world_size) and not zeros:
        dim, sizes = placement.dim, placement.padded_segments(world_size)
        padded = [
            torch.cat(
                [part, part.narrow(dim, 0, 1).repeat_interleave(size - part.size(dim), dim)], dim
            )
            for part, size in zip(x.split(placement.segments, dim), sizes, strict=True)
        ]
        x, placement = torch.cat(padded, dim), S(dim, sizes if len(sizes) > 1 else ())
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
