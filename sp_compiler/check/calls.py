"""Check of a sharded program's calls: they read what those of the unsharded program read, placed
as it is made.

The other checks look into one region each, and take the placements of its inputs and outputs for
granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import I, Placement, R
from sp_compiler.check.report import CheckReport
from sp_compiler.ir.program import Call, Program, Ref


def check_calls(
    program: Program, before: Program, param_placements: Mapping[str, Placement]
) -> CheckReport:
    """Raise an error for a program whose calls are not those of ``before``.

    Args:
        program: sharded. Behind the calls of ``before`` may be others that pass outputs of the
            model on; a region may return an output of the model a second time, as its last.
        before: the program that it was made of.
        param_placements: stored placement of each parameter.

    Raises:
        PlacementError: with the call, its layer, what it reads and what it should read.
    """
    report = CheckReport()
    for index, (call, old) in enumerate(zip(program.calls, before.calls, strict=False)):
        for position, (ref, true) in enumerate(zip(call.args, old.args, strict=True)):
            if ref != true:
                raise _error(call, index, position, f"reads {_text(ref)}; expected {_text(true)}")
    drawing: dict[Ref, int] = {}
    for index, call in enumerate(program.calls):
        for position, (node, ref) in enumerate(call.inputs):
            if ref.kind == "seed" and drawing.setdefault(ref, index) != index:
                first = drawing[ref]
                raise _error(call, index, position, f"draws the numbers of call {first} again")
            _require_placement(program, param_placements, index, position, node)
            report.checked += 1
    _require_same("outputs", program, dict(enumerate(program.outputs)), before.outputs)
    written = program.mutated_buffers
    if written.keys() != before.mutated_buffers.keys():
        raise PlacementError(
            Pass.CHECK,
            f"the program writes the buffers {', '.join(written) or 'none'}; expected "
            f"{', '.join(before.mutated_buffers) or 'none'}",
        )
    _require_same("buffers", program, written, before.mutated_buffers)
    return report


def _require_placement(
    program: Program, params: Mapping[str, Placement], index: int, position: int, node: Node
) -> None:
    """Raise an error if a call takes a value, its placeholder ``node``, in another placement than
    it has."""
    call = program.calls[index]
    ref, wanted = call.args[position], call.region.input_placements[position]
    if ref.kind == "call":
        source = program.calls[ref.index].region.output_placements[ref.output]
        # R and I differ only in their gradients, if there are any.
        needs_gradient = node.meta.get("requires_grad")
        possible = {source} if needs_gradient or source.kind not in "RI" else {R, I}
    elif ref.kind == "param":
        source = params[program.aliases.get(ref.name, ref.name)]
        # The runtime reduces the gradient of what a region takes as R.
        possible = {source, R} if source == I else {source}
    else:  # the same on every rank
        possible = {R, I}
    if wanted not in possible:
        expected = " or ".join(sorted(map(str, possible)))
        raise _error(call, index, position, f"takes {_text(ref)} as {wanted}, which is {expected}")


def _require_same(what: str, program: Program, new: Mapping[Any, Any], old: Any) -> None:
    for key, leaf in new.items():
        if leaf != old[key] and not _is_again(program, leaf, old[key]):
            raise PlacementError(
                Pass.CHECK,
                f"{what}: {key} of the program is {_text(leaf)}; expected {_text(old[key])}",
            )


def _is_again(program: Program, ref: Any, true: Any) -> bool:
    """Return whether ``ref`` is the value ``true``, in the placement that the user gets."""
    if not isinstance(ref, Ref) or not isinstance(true, Ref) or ref.kind != "call":
        return False
    call = program.calls[ref.index]
    outputs = call.region.outputs
    if ref.index != true.index or true.kind != "call":  # a call that passes outputs on
        source = _source(outputs[ref.output])
        return any(arg == true and _source(node) == source for node, arg in call.inputs)
    return _source(outputs[ref.output]) == _source(outputs[true.output])


def _source(node: Any) -> str:
    return str(node.meta.get("source", node.name))


def _text(leaf: Any) -> str:
    """Return what ``leaf`` of a program stands for, for an error."""
    if not isinstance(leaf, Ref):
        return repr(leaf)
    if leaf.kind == "call":
        return f"output {leaf.output} of call {leaf.index}"
    if leaf.kind == "size":
        return f"the size of dim {leaf.output} of input {leaf.index}"
    return f"{leaf.kind} {leaf.name or leaf.index}"


def _error(call: Call, index: int, position: int, message: str) -> PlacementError:
    name = call.region.input_names[position]
    where = f", {call.path}" if call.path else ""
    text = f"call {index} ({call.region.name}{where}) {message} for its input {name!r}"
    return PlacementError(Pass.CHECK, text)
