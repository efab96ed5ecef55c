"""Variants of a compiled program after each pass, to find the pass that changed its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch.fx import Graph

from sp_compiler.base.pass_report import Pass
from sp_compiler.codegen.module_text import CompiledRegion, printed_regions
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward, RegionCode
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import (
    LookAhead,
    Partitioned,
    PartitionedRegion,
    SplitBackward,
)
from sp_compiler.ir.fx import module_of
from sp_compiler.ir.program import Region
from sp_compiler.ir.rewriting import subgraph
from sp_compiler.ir.snapshot import (
    BACKWARD,
    BACKWARD_AHEAD,
    BACKWARD_BEHIND,
    BACKWARD_INPUTS,
    BACKWARD_REST,
    BACKWARD_WEIGHTS,
    FORWARD,
    IN_CHUNKS,
    LOSS_BACKWARD,
    RECOMPUTE,
    Snapshot,
)
from sp_compiler.trace.joint import JointGraph
from sp_compiler.verification.interpret import (
    PartitionedCode,
    ShardedCode,
    StepCode,
)

_JOINT = (Pass.JOINT, Pass.SIMPLIFY, Pass.CHUNK, Pass.SCALE_PRODUCTS)
_DIVIDED = (Pass.PARTITION, Pass.SPLIT_BACKWARD, Pass.OVERLAP, Pass.ASYNC_TP)


def variants_by_pass(
    compiled: CompiledProgram, *, joint: bool = False
) -> dict[str, CompiledProgram]:
    """Return the program after each pass from sharding on, by name of the pass: only the code of
    its regions differs.

    The code is made from the graphs that the pass left in ``compiled.stages``, rather than from
    another run of the pass, which might differ.

    Args:
        compiled: the program at the example's sizes.
        joint: whether to include the passes between sharding and the partition, which is not
            necessary if the partition's result is right.
    """
    regions, stages = printed_regions(compiled), compiled.stages
    # After sharding there is only a forward, whose backward is autograd's: a wrong joint graph
    # cannot be on both sides of a comparison.
    sharded = {
        name: ShardedCode(item.region, item.differentiable) for name, item in regions.items()
    }
    variants: dict[str, CompiledProgram] = {
        Pass.SHARD: replace(
            compiled, codes=dict(sharded), loss_backwards={}, regions=_on_device(compiled)
        )
    }
    if joint and Pass.FUSE_ATTENTION in stages:
        stage = stages[Pass.FUSE_ATTENTION]
        fused = {
            name: ShardedCode(_region_after(item.region, stage), item.differentiable)
            for name, item in regions.items()
        }
        variants[Pass.FUSE_ATTENTION] = replace(variants[Pass.SHARD], codes=dict(fused))
    for each in [each for each in _JOINT if joint and each in stages]:
        joints = {name: _joint_after(item, stages[each]) for name, item in regions.items()}
        variants[each] = _of_joints(compiled, joints)
    if joint:  # the stage of this pass is the sharded program
        joints = {name: _at_example(item.joint, item.joint.graph) for name, item in regions.items()}
        variants[Pass.TAG] = _of_joints(compiled, joints)
    for each in [each for each in _DIVIDED if each in stages]:
        parts = {name: _parts_after(item, stages[each]) for name, item in regions.items()}
        codes = {name: PartitionedCode(part) for name, part in parts.items()}
        variants[each] = _divided(compiled, codes, parts)
    return {**variants, Pass.CODEGEN: as_it_runs(compiled)}


def _of_joints(compiled: CompiledProgram, joints: Mapping[str, JointGraph]) -> CompiledProgram:
    codes = {name: PartitionedCode(_saving_all(joint)) for name, joint in joints.items()}
    return replace(compiled, codes=dict(codes), loss_backwards={}, regions=_on_device(compiled))


def as_it_runs(compiled: CompiledProgram) -> CompiledProgram:
    """Return the program with code that runs all functions of each region: a comparison of a step
    or a block then also tests functions that only other steps run.

    Args:
        compiled: the program at the example's sizes.
    """
    parts = {name: each.partitioned for name, each in compiled.regions.items()}
    return _divided(compiled, compiled.codes, parts)


def _divided(
    compiled: CompiledProgram, codes: Mapping[str, Any], parts: Mapping[str, Partitioned]
) -> CompiledProgram:
    """Return the program with ``codes``; a step runs the functions that ``parts`` have."""
    whole: dict[str, RegionCode] = {
        name: StepCode(code, parts[name], compiled.differentiable[name])
        if any((parts[name].loss, parts[name].split, parts[name].ahead))
        else code
        for name, code in codes.items()
    }
    from_loss = {
        name: LossBackward(loss.output, cast(Any, whole[name]).loss_backward)
        for name, loss in compiled.loss_backwards.items()
    }
    regions = {
        name: replace(
            split,
            partitioned=replace(
                split.partitioned, ahead=parts[name].ahead, split=parts[name].split
            ),
        )
        for name, split in compiled.regions.items()
    }
    return replace(compiled, codes=whole, loss_backwards=from_loss, regions=regions)


def _region_after(region: Region, stage: Snapshot) -> Region:
    graph = stage.graphs.get(region.name, region.module.graph)
    return replace(region, module=module_of(graph, region.module))


def _joint_after(item: CompiledRegion, stage: Snapshot) -> JointGraph:
    name = item.region.name
    in_chunks = IN_CHUNKS.join(filter(None, (name, item.joint.chunks)))
    return _at_example(item.joint, stage.graphs.get(in_chunks) or stage.graphs[name])


def _at_example(joint: JointGraph, graph: Graph) -> JointGraph:
    return replace(joint, graph=Concretizer(None).copied(graph))


def _parts_after(item: CompiledRegion, stage: Snapshot) -> Partitioned:
    parts, example = item.partitioned, Concretizer(None)

    def graph(suffix: str) -> Graph:
        return example.copied(stage.graphs[f"{item.region.name}{suffix}"])

    def graphs(*suffixes: str) -> tuple[Graph, ...]:
        """Return these graphs, or none if the pass that makes them has not run yet."""
        made = f"{item.region.name}{suffixes[0]}" in stage.graphs
        return tuple(map(graph, suffixes)) if made else ()

    loss = parts.loss
    split = graphs(BACKWARD_INPUTS, BACKWARD_WEIGHTS) + graphs(BACKWARD_BEHIND)
    ahead = graphs(RECOMPUTE, BACKWARD_REST, BACKWARD_AHEAD)
    return replace(
        parts,
        forward=graph(FORWARD),
        backward=None if parts.backward is None else graph(BACKWARD),
        loss=None if loss is None else replace(loss, backward=graph(LOSS_BACKWARD)),
        split=SplitBackward(*split) if split else None,
        ahead=LookAhead(*ahead) if ahead else None,
    )


def _saving_all(joint: JointGraph) -> Partitioned:
    """Divide ``joint`` without the partitioner: all forward values read in backward are saved."""
    backward = joint.backward_nodes()
    read = {node for each in backward for node in each.all_input_nodes}.union(joint.grads)
    first = [
        node for node in joint.graph.nodes if node.op == "call_function" and node not in backward
    ]
    saved = [node for node in (*joint.inputs, *first) if node in read]
    second = [node for node in joint.graph.nodes if node in backward and node.op == "call_function"]
    return Partitioned(
        subgraph(joint.inputs, first, [*joint.outputs, *saved]),
        subgraph([*saved, *joint.tangents], second, joint.grads),
        (),
        len(joint.outputs),
    )


def _on_device(compiled: CompiledProgram) -> dict[str, PartitionedRegion]:
    """Return the regions without offloading, recompute prefetch and deferred gradients: code from
    before the partition saves other values, and has no functions for these."""
    whole: dict[str, Any] = {"saved": (), "ahead": None, "split": None}
    return {
        name: replace(split, partitioned=replace(split.partitioned, **whole))
        for name, split in compiled.regions.items()
    }
