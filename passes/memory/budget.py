"""Compile a program so that the peak of a step stays within a budget, at least estimated time.

Each distinct region is split in several ways (:mod:`sp_compiler.passes.memory.candidates`), each
call of it gets one (:mod:`sp_compiler.solve.memory_budget`). A region of which several are used
becomes as many regions of the same graph::

    Block, Block, Block, Block   ->   BlockKeep25, BlockKeep25, BlockKeep100, BlockKeep100

named by the percentage that they keep of the most that it would pay to keep. Those that need more
in backward come first: there less is kept by others then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import UNITS, bytes_text
from sp_compiler.codegen.module_text import CompiledRegion, emit
from sp_compiler.cost.step_walk import stops
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Call, Program, Ref, Region
from sp_compiler.ir.snapshot import copy_graph
from sp_compiler.passes.memory.candidates import Variant, variants, write_tags
from sp_compiler.passes.memory.cut import Cut
from sp_compiler.solve.memory_budget import Stop, cheapest, needs, peak_bytes, smallest
from sp_compiler.trace.joint import JointGraph


@dataclass(frozen=True)
class Budgeted:
    """A program that fits.

    Attributes:
        names: of the region of each call.
        regions: compiled, in order of first use.
    """

    program: Program
    names: tuple[str, ...]
    regions: tuple[CompiledRegion, ...]


Ways = Mapping[str, Sequence[Variant]]
"""In which ways each region, by name, can be split."""


def ways_to_split(
    program: Program, joints: Mapping[str, JointGraph], cuts: Mapping[str, Cut], world_size: int
) -> Ways:
    """The ways for every region of ``program``, whatever the budget.

    Args:
        program: sharded.
        joints: of each region, by name; their tags are overwritten.
        cuts: what is wanted of each region, by name.
        world_size: number of tensor-parallel ranks.
    """
    returned = {
        name: frozenset(ref.output for ref in _returned(program) if _name(program, ref) == name)
        for name in cuts
    }
    return {
        name: variants(joint, world_size, how=cuts[name], free=returned[name])
        for name, joint in joints.items()
    }


def compile_under_budget(
    program: Program,
    joints: Mapping[str, JointGraph],
    found: Ways,
    world_size: int,
    budget_bytes: int,
) -> Budgeted:
    """Split every call of ``program``, which is left as it is.

    Args:
        program: sharded.
        joints: of each region, by name; their tags are overwritten.
        found: see :func:`ways_to_split`.
        world_size: number of tensor-parallel ranks.
        budget_bytes: what the peak of activations on a rank may be.

    Raises:
        ArgumentError: the budget is too small; the message has the least that would do.
    """
    calls = stops(_in_the_first_way(program, joints, found, world_size), found)
    picks = cheapest(calls, budget_bytes)
    if picks is None:
        raise ArgumentError(_too_small(program, calls, budget_bytes))
    picks = _in_order(program, calls, picks)
    chosen = [
        found[call.region.name][pick] for call, pick in zip(program.calls, picks, strict=True)
    ]
    names = _names(program, found, chosen)
    split = rename_regions(program, names)
    originals = [joints[call.region.name] for call in program.calls]
    return Budgeted(split, names, _emitted(split, originals, chosen))


def rename_regions(program: Program, names: Sequence[str]) -> Program:
    """Each call with a region of the given name: a copy where that is not the region's own."""
    regions: dict[tuple[int, str], Region] = {}
    calls = []
    for call, name in zip(program.calls, names, strict=True):
        region = call.region
        if name != region.name and (id(region), name) not in regions:
            graph = copy_graph(region.module.graph)
            module = GraphModule(region.module, graph, class_name=name)
            regions[id(region), name] = replace(region, name=name, module=module)
        calls.append(Call(regions.get((id(region), name), region), call.path, call.args))
    return replace(program, calls=calls)


def _returned(program: Program) -> list[Ref]:
    return [ref for ref in program.outputs if isinstance(ref, Ref) and ref.kind == "call"]


def _name(program: Program, ref: Ref) -> str:
    return program.calls[ref.index].region.name


def _in_the_first_way(
    program: Program,
    joints: Mapping[str, JointGraph],
    found: Ways,
    world_size: int,
) -> CompiledProgram:
    regions = {
        region.name: emit(region, joints[region.name], first.partitioned)
        for region in program.regions
        for first in found[region.name][:1]
    }
    return CompiledProgram(
        program,
        {name: region.code for name, region in regions.items()},
        {},
        world_size,
        differentiable={name: region.differentiable for name, region in regions.items()},
        regions=regions,
    )


def _in_order(program: Program, calls: Sequence[Stop], picks: list[int]) -> list[int]:
    """The same ways in the order that the top of this file says, unless that raises the peak."""
    ordered = list(picks)
    for region in program.regions:
        places = [
            index
            for index, call in enumerate(program.calls)
            if call.region is region and len(calls[index].ways) > 1
        ]
        ways = sorted(
            (picks[index] for index in places),
            key=lambda pick: (-calls[places[0]].ways[pick].backward_bytes, pick),
        )
        for index, pick in zip(places, ways, strict=True):
            ordered[index] = pick
    return ordered if peak_bytes(calls, ordered) <= peak_bytes(calls, picks) else picks


def _names(program: Program, found: Ways, chosen: Sequence[Variant]) -> tuple[str, ...]:
    """Of the region of each call; the region's own where all its calls are split alike."""
    names: dict[int, str] = {}
    taken = {region.name for region in program.regions}
    for region in program.regions:
        mine = [
            variant
            for call, variant in zip(program.calls, chosen, strict=True)
            if call.region is region
        ]
        different = list({id(variant): variant for variant in mine}.values())
        most = max(variant.partitioned.kept_bytes for variant in found[region.name])
        for variant in different:
            percent = round(100 * variant.partitioned.kept_bytes / max(1, most))
            name = region.name if len(different) == 1 else f"{region.name}Keep{percent}"
            while len(different) > 1 and name in taken:
                name += "x"
            taken.add(name)
            names[id(variant)] = name
    return tuple(names[id(variant)] for variant in chosen)


def _emitted(
    program: Program, joints: Sequence[JointGraph], chosen: Sequence[Variant]
) -> tuple[CompiledRegion, ...]:
    done: dict[str, CompiledRegion] = {}
    for call, joint, variant in zip(program.calls, joints, chosen, strict=True):
        if call.region.name not in done:
            paths = program.paths(call.region)
            write_tags(joint, variant.tags)
            done[call.region.name] = emit(call.region, joint.copy(), variant.partitioned, paths)
    return tuple(done.values())


def _too_small(program: Program, calls: Sequence[Stop], budget_bytes: int) -> str:
    peaks = list(needs(calls, smallest(calls)))
    index = max(range(len(peaks)), key=lambda i: peaks[i][1])
    kept, peak = peaks[index]
    where = program.calls[index].path or program.calls[index].region.name
    return (
        f"memory_budget={budget_bytes} ({bytes_text(budget_bytes)}): the least that would do is "
        f"{peak} ({_rounded_up(peak)}). Then {where} needs most: {bytes_text(kept)} that it and "
        f"the calls before it keep for backward, {bytes_text(peak - kept)} besides (results, "
        "gradients, what it makes inside). Raise the budget or tp, or use a smaller batch"
    )


def _rounded_up(num_bytes: int) -> str:
    """In the largest unit that fits, as an argument that is large enough."""
    power = max(0, min(4, (num_bytes.bit_length() - 1) // 10))
    return f'"{math.ceil(1000 * num_bytes / 1024**power) / 1000}{UNITS[power]}"'
