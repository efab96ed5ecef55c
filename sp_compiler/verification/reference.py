"""Runs captures and programs on one device, node by node, under torch's own autograd.

This is what everything else is compared with: no placements, no joint graph, no generated code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import sp_compiler.ops.operators  # noqa: F401 - registers the operators
from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import ArgumentError
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.program import Program, Ref
from sp_compiler.ir.symbolic import SizedInterpreter
from sp_compiler.ops.dropout_counter import call_seed, dropout, dropout_mask

_sp = torch.ops.sp_compiler


@dataclass
class ReferenceResult:
    """Flattened outputs, in the order of ``out_spec``, and the new values of mutated buffers.

    ``call_inputs`` is what each call of a program was given.
    """

    outputs: list[Any]
    mutated_buffers: dict[str, Tensor] = field(default_factory=dict)
    call_inputs: list[list[Any]] = field(default_factory=list)


def run_captured(
    captured: Captured,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    flat_inputs: Sequence[Any],
    seed: Tensor | None = None,
) -> ReferenceResult:
    """Run the flat graph.

    Args:
        captured: a capture, normalised or not.
        params: whole parameters by their name in ``model.named_parameters()``.
        buffers: whole buffers by name.
        flat_inputs: leaves of :func:`sp_compiler.trace.export.flatten_inputs`.
        seed: dropout seed, 0-dim int64; the dropouts of a flat graph share it and differ in site.
    """
    sources = _Sources(params, buffers, captured.constants, flat_inputs, seed)
    values = [sources.get(ref) for ref in captured.refs]
    returned = list(run_graph(captured.module, values))
    written = dict(zip(captured.mutated, returned[len(captured.outputs) :], strict=True))
    return ReferenceResult(returned[: len(captured.outputs)], written)


def run_program(
    program: Program,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    flat_inputs: Sequence[Any],
    seed: Tensor | None = None,
) -> ReferenceResult:
    """Run an unsharded program call by call; arguments as of :func:`run_captured`.

    The seed of a call is made of the forward's seed and the call's position, as when compiled.
    """
    sources = _Sources(params, buffers, program.constants, flat_inputs, seed)
    call_inputs = []
    for index, call in enumerate(program.calls):
        values = [sources.get(ref, index) for ref in call.args]
        call_inputs.append(values)
        sources.results.append(run_graph(call.region.module, values))
    outputs = [sources.get(leaf) if isinstance(leaf, Ref) else leaf for leaf in program.outputs]
    written = {name: sources.get(ref) for name, ref in program.mutated_buffers.items()}
    return ReferenceResult(outputs, written, call_inputs)


@dataclass
class _Sources:
    """Where the values of refs come from."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    flat_inputs: Sequence[Any]
    seed: Tensor | None
    results: list[tuple[Any, ...]] = field(default_factory=list)

    def get(self, ref: Ref, call_index: int | None = None) -> Any:
        """The value of ``ref``; a seed is made distinct per call where ``call_index`` is given."""
        if ref.kind == "call":
            return self.results[ref.index][ref.output]
        if ref.kind == "input":
            return self.flat_inputs[ref.index]
        if ref.kind == "size":
            return int(self.flat_inputs[ref.index].shape[ref.output])
        if ref.kind == "seed":
            if self.seed is None:
                raise ArgumentError("the graph has dropout; pass seed= (a 0-dim int64 tensor)")
            return self.seed if call_index is None else call_seed(self.seed, call_index)
        named = {"param": self.params, "buffer": self.buffers, "constant": self.constants}
        return named[ref.kind][ref.name]


@without_autocast()
def run_graph(module: GraphModule, values: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph of whole tensors returns."""
    return _ReferenceInterpreter(module).run(*values)


class _ReferenceInterpreter(SizedInterpreter):
    """Gives the opaque dropout operators their meaning on one rank."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _sp.dropout.default:
            return _Dropout.apply(*args)
        if target is _sp.dropout_mask.default:
            x, seed, p, site, dim, world_size = args
            return dropout_mask(x, seed, p, site, dim, world_size, rank=0)
        if target is torch.ops.aten.copy.default:  # which has no derivative
            x, source = args[:2]
            return source.to(x.dtype).expand(x.shape).clone()
        return super().call_function(target, args, kwargs)


class _Dropout(torch.autograd.Function):
    """Dropout is linear and its own gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int
    ) -> Tensor:
        ctx.args = (seed, p, site, dim, world_size)
        return dropout(x, seed, p, site, dim, world_size, rank=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        seed, p, site, dim, world_size = ctx.args
        return dropout(grad, seed, p, site, dim, world_size, rank=0), None, None, None, None, None
