"""The calls of a step, as a comment at the end of generated code."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sp_compiler.base.python_text import comment, identifier
from sp_compiler.ir.forward_backward import PartitionedRegion
from sp_compiler.ir.program import Call, Program

_HEAD = (
    "A step runs this from top to bottom, and the backward of each call from bottom to top.",
    "Parameters and buffers are left out; gradients of parameters that are R are summed over tp",
    "after the backward.",
    "",
)


def wiring(
    program: Program,
    regions: Sequence[PartitionedRegion],
    value_names: Mapping[str, Mapping[str, str]],
) -> str:
    """Return how the calls of ``program`` are chained, as lines of Python in a comment.

    Args:
        regions: regions of the program.
        value_names: by the name of a region, the names that its nodes have in the text.
    """
    outputs = {}
    for each in regions:
        own_names, parts = value_names[each.region.name], each.partitioned
        returned = parts.forward.output_node().args[0][: parts.num_outputs]
        outputs[each.region.name] = [own_names.get(node.name, node.name) for node in returned]
    names = _named(program, outputs)
    statements: list[tuple[str, str]] = []
    for index, call in enumerate(program.calls):
        results = [names[index, k] for k in range(len(outputs[call.region.name]))]
        called = f"{identifier(call.region.name)}({', '.join(_arguments(call, names))})"
        statements.append((", ".join(results) + " = " + called if results else called, call.path))
    lines = list(_HEAD)
    # Layers of one kind between layers of the same kind have equal statements.
    for text, group in itertools.groupby(statements, key=lambda statement: statement[0]):
        paths = [path for _, path in group]
        where = paths[0] if len(paths) == 1 else f"{len(paths)} times: {paths[0]} to {paths[-1]}"
        lines.append(f"    {text}" + (f"  # {where}" if where else ""))
    returned = [names[ref.index, ref.output] for ref in program.call_outputs.values()]
    lines.append(f"    return {', '.join(returned)}")
    return "\n\n" + "".join(f"{comment(line).rstrip()}\n" for line in lines)


def _arguments(call: Call, names: Mapping[tuple[int, int], str]) -> list[str]:
    arguments: list[str] = []
    for ref, own_name in zip(call.args, call.region.input_names, strict=True):
        if ref.kind == "call":
            arguments.append(names[ref.index, ref.output])
        elif ref.kind == "input":
            arguments.append(own_name)
    return arguments


def _named(program: Program, outputs: Mapping[str, Sequence[str]]) -> dict[tuple[int, int], str]:
    """Return a name for each result of each call; a name means one value until its last use."""
    last_use: dict[tuple[int, int], int] = {}
    for index, call in enumerate(program.calls):
        last_use.update(((ref.index, ref.output), index) for ref in call.args if ref.kind == "call")
    returned = program.call_outputs.values()
    last_use.update(((ref.index, ref.output), len(program.calls)) for ref in returned)
    names: dict[tuple[int, int], str] = {}
    # By name, the index of the first call whose results may get it again.
    taken: dict[str, int] = {}
    for index, call in enumerate(program.calls):
        for output, wanted in enumerate(outputs[call.region.name]):
            candidates = itertools.chain(
                [wanted], (f"{wanted}_{number}" for number in itertools.count(1))
            )
            name = next(each for each in candidates if taken.get(each, -1) <= index)
            names[index, output] = name
            # A result that nothing reads keeps its name to itself in its own statement.
            taken[name] = max(last_use.get((index, output), index), index + 1)
    return names
