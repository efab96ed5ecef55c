"""Runs captures and programs on one device, node by node, under torch's own autograd.

It is the reference of all comparisons, without placements, joint graphs and generated code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec

from sp_compiler.base.errors import ArgumentError
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.program import Program, Ref
from sp_compiler.ops.counter import call_seed
from sp_compiler.verification.interpret import run_graph


@dataclass
class ReferenceResult:
    """Flattened outputs, in the order of ``out_spec``, and the new values of mutated buffers.

    ``call_inputs`` has the inputs of each call of a program.
    """

    outputs: list[Any]
    out_spec: TreeSpec
    mutated_buffers: dict[str, Tensor] = field(default_factory=dict)
    call_inputs: list[list[Any]] = field(default_factory=list)


def run_captured(
    captured: Captured,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    flat_inputs: Sequence[Any],
    seed: Tensor | None = None,
) -> ReferenceResult:
    """Run a captured flat graph.

    Args:
        captured: a capture, normalized or not.
        params: global parameters by their name in ``model.named_parameters()``.
        buffers: global buffers by name.
        flat_inputs: leaves of :func:`sp_compiler.trace.export.flatten_inputs`.
        seed: seed of random numbers, 0-dim int64; all draws of a flat graph share it, with
            different sites.
    """
    sources = _Sources(params, buffers, captured.constants, flat_inputs, seed)
    # A flat graph is one call, so its seed is the forward's own.
    values = [sources.get(ref) for ref in captured.refs]
    returned = list(run_graph(captured.module, values))
    # A functional graph returns new values of buffers after its outputs.
    written = dict(zip(captured.mutated, returned[len(captured.outputs) :], strict=True))
    return ReferenceResult(returned[: len(captured.outputs)], captured.out_spec, written)


def run_program(
    program: Program,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    flat_inputs: Sequence[Any],
    seed: Tensor | None = None,
) -> ReferenceResult:
    """Run an unsharded program call by call; arguments as for :func:`run_captured`.

    The seed of a call is derived from the forward's seed and the call's number, as in compiled
    code.
    """
    sources = _Sources(params, buffers, program.constants, flat_inputs, seed)
    call_inputs = []
    for call in program.calls:
        values = [sources.get(ref, of_call=True) for ref in call.args]
        call_inputs.append(values)
        # Kept to the end, unlike in the executor: a comparison may ask for any of them.
        sources.results.append(run_graph(call.region.module, values))
    outputs = [sources.get(leaf) if isinstance(leaf, Ref) else leaf for leaf in program.outputs]
    written = {name: sources.get(ref) for name, ref in program.mutated_buffers.items()}
    return ReferenceResult(outputs, program.out_spec, written, call_inputs)


@dataclass
class _Sources:
    """Values of refs."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    flat_inputs: Sequence[Any]
    seed: Tensor | None
    results: list[tuple[Any, ...]] = field(default_factory=list)

    def get(self, ref: Ref, *, of_call: bool = False) -> Any:
        """Return the value of ``ref``; a seed ``of_call`` is made distinct for the call."""
        if ref.kind == "call":
            return self.results[ref.index][ref.output]
        if ref.kind == "input":
            return self.flat_inputs[ref.index]
        if ref.kind == "size":
            return int(self.flat_inputs[ref.index].shape[ref.output])
        if ref.kind == "seed":
            if self.seed is None:
                raise ArgumentError("the graph draws random numbers; pass seed= (0-dim int64)")
            return call_seed(self.seed, ref.index) if of_call else self.seed
        named = {"param": self.params, "buffer": self.buffers, "constant": self.constants}
        return named[ref.kind][ref.name]
