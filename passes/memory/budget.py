"""Choose what is recomputed so that the peak of a step stays within a budget, at the least
estimated time.

Each distinct region is split in several ways (:mod:`sp_compiler.passes.memory.candidates`), and
each call gets one of them (:mod:`sp_compiler.solve.memory_budget`). A region with several splits in
use becomes several regions of the same graph::

    Block, Block, Block, Block   ->   BlockKeep25, BlockKeep25, BlockKeep100, BlockKeep100

named by the bytes that they save, as a percentage of the most that any of the splits saves. Those
with larger peaks in backward come first, because earlier calls have saved fewer bytes then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import UNITS, bytes_text
from sp_compiler.cost.budget_problem import budget_problem
from sp_compiler.ir.fx import module_of
from sp_compiler.ir.program import Call, Program, Ref, Region
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.passes.memory.candidates import Candidate, candidates, offloads
from sp_compiler.passes.memory.partition import PartitionOptions
from sp_compiler.passes.memory.tag import write_tags
from sp_compiler.passes.memory.tag_program import TaggedProgram
from sp_compiler.solve.memory_budget import (
    CallSplits,
    cheapest,
    is_fastest,
    needs,
    peak_bytes,
    smallest,
)
from sp_compiler.trace.joint import JointGraph

Candidates = Mapping[str, Sequence[Candidate]]
"""The ways to split each region, by name."""


class BudgetError(ArgumentError):
    """A budget is too small: ``least_bytes`` is the minimum that fits."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def candidates_of(
    program: Program,
    joints: Mapping[str, Sequence[JointGraph]],
    options: Mapping[str, PartitionOptions],
    world_size: int,
) -> Candidates:
    """Return the ways to split every region of ``program``, for any budget.

    Args:
        program: sharded.
        joints: of each region, by name, its loss head in several numbers of chunks; their tags are
            overwritten.
        options: partition options of each region, by name.
        world_size: number of tensor-parallel ranks.
    """
    free = _free_outputs(program)
    return {
        name: [
            way
            for joint in chunked
            for way in candidates(joint, world_size, options=options[name], free=free[name])
        ]
        for name, chunked in joints.items()
    }


def with_offloads(
    ways: Candidates,
    program: Program,
    joints: Mapping[str, Sequence[JointGraph]],
    options: Mapping[str, PartitionOptions],
    world_size: int,
) -> Candidates:
    """Return ``ways`` of :func:`candidates_of`, followed by others that send saved tensors to the
    host."""
    free = _free_outputs(program)
    names = [call.region.name for call in program.calls]
    sent: dict[str, list[Candidate]] = {name: [] for name in joints}
    # After the last call nothing runs while something could go to the host.
    for name in dict.fromkeys(names[:-1]):
        own_inputs = _own_inputs(program, name)
        for joint in joints[name]:
            sent[name] += offloads(
                joint,
                world_size,
                options=options[name],
                free=free[name],
                own_inputs=own_inputs,
                num_calls=names.count(name),
            )
    return {name: [*ways[name], *sent[name]] for name in joints}


def _free_outputs(program: Program) -> dict[str, frozenset[int]]:
    """Return the outputs of each region that are free to save.

    These are the model's outputs, which live through backward anyway.
    """
    free: dict[str, set[int]] = {region.name: set() for region in program.regions}
    for ref in program.call_outputs.values():
        free[program.calls[ref.index].region.name].add(ref.output)
    return {name: frozenset(outputs) for name, outputs in free.items()}


def _own_inputs(program: Program, name: str) -> frozenset[int]:
    """Return the inputs of the region ``name`` that, in each call, are read only by that call."""
    reads = Counter(ref for call in program.calls for ref in call.args if ref.kind == "call")
    returned = (*program.outputs, *program.mutated_buffers.values())
    reads.update(ref for ref in returned if isinstance(ref, Ref))
    own = [
        {index for index, ref in enumerate(call.args) if ref.kind == "call" and reads[ref] == 1}
        for call in program.calls
        if call.region.name == name
    ]
    return frozenset(set.intersection(*own))


def tag_under_budget(
    program: Program,
    ways: Candidates,
    world_size: int,
    budget_bytes: int,
    state_bytes: int = 0,
) -> TaggedProgram:
    """Tag a copy of ``program`` with what every call recomputes.

    Args:
        program: sharded.
        ways: see :func:`candidates_of`.
        world_size: number of tensor-parallel ranks.
        budget_bytes: largest allowed peak of activations on a rank.
        state_bytes: bytes of parameters, gradients and optimizer state, if the user's limit
            includes them; else 0.

    Raises:
        BudgetError: the budget is too small; the message has the minimum that fits.
    """
    differentiable = {name: each[0].joint.differentiable for name, each in ways.items()}
    calls = budget_problem(program, ways, differentiable, world_size)
    picks = cheapest(calls, budget_bytes)
    if picks is None:
        raise _too_small(program, calls, budget_bytes, state_bytes)
    if is_fastest(calls, picks):
        note = "a larger memory budget would not make the step faster in this estimate"
        program = replace(program, notes=[*program.notes, note])
    # The search breaks ties between equal layers arbitrarily; users expect an order.
    picks = _in_order(program, calls, picks)
    chosen = [ways[call.region.name][pick] for call, pick in zip(program.calls, picks, strict=True)]
    names = _names(program, ways, chosen)
    tagged: dict[str, JointGraph] = {}
    for name, candidate in zip(names, chosen, strict=True):
        if name not in tagged:
            # Copied right away: the region's next candidate overwrites the tags of the same nodes.
            write_tags(candidate.joint, candidate.tags)
            tagged[name] = candidate.joint.copy()
    origins = {name: call.region.name for name, call in zip(names, program.calls, strict=True)}
    return TaggedProgram.of(_rename_regions(program, names), tagged, origins)


def _rename_regions(program: Program, names: Sequence[str]) -> Program:
    """Each call with a region of the given name: a copy unless that is the region's own name."""
    regions: dict[tuple[int, str], Region] = {}
    calls = []
    for call, name in zip(program.calls, names, strict=True):
        region = call.region
        # A copy, because later passes write other metadata on it; calls with equal splits share
        # one.
        if name != region.name and (id(region), name) not in regions:
            graph = copy_graph(region.module.graph)
            module = module_of(graph, region.module, name)
            regions[id(region), name] = replace(region, name=name, module=module)
        calls.append(Call(regions.get((id(region), name), region), call.path, call.args))
    return replace(program, calls=calls)


def _in_order(program: Program, calls: Sequence[CallSplits], picks: list[int]) -> list[int]:
    """The same splits in the order described at the top of this file, unless it raises the peak."""
    ordered = list(picks)
    for region in program.regions:
        places = [
            index
            for index, call in enumerate(program.calls)
            if call.region is region and len(calls[index].splits) > 1
        ]
        ways = sorted(
            (picks[index] for index in places),
            key=lambda pick: (-calls[places[0]].splits[pick].backward_bytes, pick),
        )
        for index, pick in zip(places, ways, strict=True):
            ordered[index] = pick
    # The order is a convenience; the budget comes first.
    return ordered if peak_bytes(calls, ordered) <= peak_bytes(calls, picks) else picks


def _names(program: Program, ways: Candidates, chosen: Sequence[Candidate]) -> tuple[str, ...]:
    """Names for the region of each call; its own name if all its calls are split the same."""
    names: dict[int, str] = {}
    taken = {region.name for region in program.regions}
    for region in program.regions:
        used = {
            id(candidate): candidate
            for call, candidate in zip(program.calls, chosen, strict=True)
            if call.region is region
        }
        # A percentage shows at a glance which layers save much; bytes would make names of ten
        # digits.
        most = max(candidate.partitioned.kept_bytes for candidate in ways[region.name])
        for key, candidate in used.items():
            percent = round(100 * candidate.partitioned.kept_bytes / max(1, most))
            name = region.name if len(used) == 1 else f"{region.name}Keep{percent}"
            while len(used) > 1 and name in taken:  # two that round to the same percentage
                name += "x"
            taken.add(name)
            names[key] = name
    return tuple(names[id(candidate)] for candidate in chosen)


_OUTSIDE = {
    "Model": "the model",
    "Prologue": "the code before the first layer",
    "Epilogue": "the code after the last layer, such as the loss,",
}


def _too_small(
    program: Program, calls: Sequence[CallSplits], budget_bytes: int, state_bytes: int
) -> BudgetError:
    peaks = list(needs(calls, smallest(calls)))
    index = max(range(len(peaks)), key=lambda i: peaks[i][1])
    kept, peak = peaks[index]
    call = program.calls[index]
    # Regions outside of layers have names that the user does not know.
    where = call.path or _OUTSIDE.get(call.region.name, "the code between layers")
    # In the user's own terms: the limit that was given, and the minimum for that limit.
    name, limit, least = "memory_budget", budget_bytes, peak
    state = ""
    if state_bytes:
        name, limit, least = "device_memory", budget_bytes + state_bytes, peak + state_bytes
        state = (
            f", of which {bytes_text(state_bytes)} are parameters, gradients and AdamW's moments"
        )
    message = (
        f"{name}={limit} ({bytes_text(limit)}): the minimum that fits is "
        f"{least} ({_rounded_up(least)}){state}. At this minimum {where} needs the most memory: "
        f"{bytes_text(kept)} that it and the calls before it save for backward, and "
        f"{bytes_text(peak - kept)} for results, gradients and temporary values. "
        f"Raise {name} or tp, or use a smaller batch"
    )
    return BudgetError(message, peak)


def _rounded_up(num_bytes: int) -> str:
    """In the largest unit that fits, as an argument that is large enough."""
    # Rounded up, so that the text can be passed as the argument.
    power = max(0, min(4, (num_bytes.bit_length() - 1) // 10))
    return f'"{math.ceil(1000 * num_bytes / 1024**power) / 1000}{UNITS[power]}"'
