"""Facts about a program that decide how its regions are split into forward and backward."""

from __future__ import annotations

from sp_compiler.ir.fx import placements_of
from sp_compiler.ir.program import Program, Region
from sp_compiler.options import CompileOptions
from sp_compiler.passes.memory.partition import PartitionOptions


def partition_options(program: Program, options: CompileOptions) -> dict[str, PartitionOptions]:
    """Return the partition options of each region of the sharded ``program``, by name."""
    own_parameters = program.own_parameters(options.tp)
    in_place = program.gradients_in_place(options.tp)
    by_region = {}
    for region in program.regions:
        calls = [index for index, call in enumerate(program.calls) if call.region is region]
        # Calls in a row may defer their own gradients, but not parts of a sum.
        own = [(in_place if len(calls) == 1 else own_parameters)[index] for index in calls]
        by_region[region.name] = PartitionOptions(
            loss_output=_loss_output(program, region),
            # Common to all calls: one graph serves them, and may rely only on what holds for each.
            own_parameters=frozenset.intersection(*own),
            overlap=options.overlap and options.tp > 1,  # one rank has no collectives
            sizes=program.sizes,
            runs_last=_runs_last(program, region),
            hardware=options.device,
            fused=options.fuses,
            world_size=options.tp,
            # Inductor may return one tensor for two results that it finds equal.
            reduce_in_place=options.backend == "eager",
        )
    return by_region


def _runs_last(program: Program, region: Region) -> bool:
    """Return whether ``region`` is called once, after all layers."""
    calls = list(program.calls)
    # A region that only returns what layers stored in attributes saves nothing for its backward.
    while calls and _hands_on(calls[-1].region):
        calls.pop()
    # With nothing before it, it is the entire model: what it saves is what a step holds.
    (*before, last) = calls or program.calls
    return last.region is region and bool(before) and all(c.region is not region for c in before)


def _hands_on(region: Region) -> bool:
    """Return whether ``region`` computes nothing: it only converts values to other placements."""
    nodes = region.module.graph.nodes
    return all(placements_of(n) is not None for n in nodes if n.op == "call_function")


def _loss_output(program: Program, region: Region) -> int | None:
    """The output of ``region`` that is the model's loss, if its other outputs are only returned."""
    loss = program.loss
    if loss is None or program.calls[loss.index].region is not region:
        return None
    # Otherwise another region's backward would send gradients here, in addition to the loss's own.
    passed_on = any(
        ref.kind == "call" and ref.index == loss.index
        for call in program.calls
        for ref in call.args
    )
    return None if passed_on else loss.output
