"""Tag the joint graphs of a program with what backward recomputes.

A named policy tags each region separately; for a memory budget see
:mod:`sp_compiler.passes.memory.budget`. The tags are also written back to the operators of the
sharded regions, where users see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.forward_backward import SavedTensor
from sp_compiler.ir.op_traits import base, has_inner_communication
from sp_compiler.ir.program import Program
from sp_compiler.passes.memory.fewest_chunks import fewest_chunks
from sp_compiler.passes.memory.partition import PartitionOptions, partition_and_overlap
from sp_compiler.passes.memory.tag import POLICIES, tag_recompute
from sp_compiler.trace.joint import JointGraph

Item = TypeVar("Item")


@dataclass(frozen=True)
class TaggedProgram:
    """A sharded program whose joint graphs are tagged.

    Attributes:
        program: a region of the sharded program may become several here, with equal graphs.
        joints: each region's own joint graph with its tags, by name.
        origins: region name to the name of the sharded program's region.
    """

    program: Program
    joints: dict[str, JointGraph]
    origins: dict[str, str]

    @classmethod
    def of(
        cls, program: Program, joints: dict[str, JointGraph], origins: dict[str, str]
    ) -> TaggedProgram:
        """Write the tags of ``joints`` back to the regions of ``program``, and report them."""
        report = report_of(Pass.TAG)
        for region in program.regions:
            tags: dict[str, str] = {}
            for node in joints[region.name].graph.nodes:
                tag, source = node.meta.get("recompute"), node.meta.get("source")
                if tag is None:
                    continue
                report.rewrote(kind=tag)
                if has_inner_communication(node):
                    report.decline(node, "recomputed, it would communicate again")
                # An operator that became several is tagged as saved if one of them is.
                if tags.get(source, "recompute") == "recompute" or tag == "save":
                    tags[source] = tag
            for node in region.module.graph.nodes:
                node.meta.pop("recompute", None)  # left by another setting
                if node.name in tags:
                    node.meta["recompute"] = tags[node.name]
        return cls(program, joints, origins)

    def by_operator(self, found: Mapping[tuple[str, str], Item]) -> dict[tuple[str, str], Item]:
        """Return what was ``found`` for operators of the sharded regions, by those of this
        program."""
        return {
            (name, operator): item
            for name, origin in self.origins.items()
            for (region, operator), item in found.items()
            if region == origin
        }


def tag_program(
    program: Program,
    joints: Mapping[str, Sequence[JointGraph]],
    options: Mapping[str, PartitionOptions],
    policy: str,
    world_size: int,
) -> TaggedProgram:
    """Tag copies of ``joints`` for a named policy.

    Args:
        program: sharded.
        joints: of each region, by name, its loss head in several numbers of chunks, the fewest
            first; left as they are.
        options: partition options of each region, by name.
        policy: its name.
        world_size: number of tensor-parallel ranks.
    """
    # The first has no chunks, unless the user asked for them.
    count = None if POLICIES[policy].chunks_rows else 1
    tagged = {name: [each.copy() for each in ways[:count]] for name, ways in joints.items()}
    for name, chunked in tagged.items():
        for joint in chunked:
            _tag_region(joint, options[name], policy)
    chosen = fewest_chunks(program, tagged, options, world_size)
    program = replace(program, notes=[*program.notes, *_found_nothing(chosen, policy)])
    return TaggedProgram.of(program, chosen, {name: name for name in chosen})


def _found_nothing(joints: Mapping[str, JointGraph], policy: str) -> Iterator[str]:
    """Yield a note if no tag in ``joints`` distinguishes ``policy`` from saving everything."""
    sought = POLICIES[policy].seeks
    nodes = (node for joint in joints.values() for node in joint.graph.nodes)
    if sought and not any(node.meta.get("recompute_reason") == sought for node in nodes):
        yield (
            f'recompute="{policy}" recomputes nothing here: no {sought} was found (two matmuls of '
            "activations with an unfused softmax and no weights between them); "
            'recompute="selective" or "full" save less'
        )


def _tag_region(joint: JointGraph, options: PartitionOptions, policy: str) -> None:
    """Tag by ``policy``, or by its replacement for the region where backward starts."""
    tag_recompute(joint, policy)
    other = POLICIES[policy].last_region if options.runs_last else ""
    if not other:
        return
    # Both are tried: whether anything is gained shows only in the resulting backward.
    backward = partition_and_overlap(joint, options).step_backward
    tag_recompute(joint, other)
    if not _meet(partition_and_overlap(joint, options).saved, backward):
        tag_recompute(joint, policy)


def _meet(saved: Sequence[SavedTensor], backward: Graph | None) -> bool:
    """Return whether the values of ``saved`` that ``backward`` recomputes all exist at the same
    time.

    The results of several heads, each freed before the next, do not.
    """
    if backward is None:
        return True
    nodes = list(backward.nodes)
    made, used = {node: position for position, node in enumerate(nodes)}, dict[Node, int]()
    for position, node in enumerate(nodes):
        used.update((base(source), position) for source in node.all_input_nodes)
    names = {tensor.name for tensor in saved}
    again = [node for node in used if node.meta.get("recomputed") and node.name in names]
    return not again or max(map(made.__getitem__, again)) < min(map(used.__getitem__, again))
