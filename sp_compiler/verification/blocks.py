"""Each distinct block, forward and backward, on random data: sharded against whole.

Finds what a whole step hides: a conversion whose forward is right and whose gradient is not, or a
gradient that differs between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.errors import SPCompilerError
from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Program, Region
from sp_compiler.verification.interpret import run_graph
from sp_compiler.verification.report import Comparison, gradient_errors, output_errors
from sp_compiler.verification.simulate import gather_check, scatter, simulated_ranks

_SEED = 7


def check_blocks(
    program: Program,
    variants: Mapping[str, CompiledProgram],
    call_inputs: Sequence[Sequence[Any]],
    tolerance: float,
) -> Iterator[Comparison]:
    """Compare every region, as each pass left it, with the whole one; all ways it was split.

    Args:
        program: of whole tensors.
        variants: by pass, the compiled program with the code to run.
        call_inputs: what each call of ``program`` was given, for inputs that cannot be random.
        tolerance: allowed relative error.
    """
    for region in program.regions:
        index = next(i for i, call in enumerate(program.calls) if call.region is region)
        data = _Data.of(region, call_inputs[index])
        for stage, compiled in variants.items():
            # Sharding may put calls behind the others.
            pairs = zip(program.calls, compiled.program.calls, strict=False)
            ways = {mine.region.name: None for call, mine in pairs if call.region is region}
            for name in ways:
                yield _check(stage, region, name, compiled, data, tolerance)


@dataclass(frozen=True)
class _Data:
    """Inputs and tangents of one whole region, and what it computes of them."""

    inputs: list[Any]
    outputs: list[Tensor]
    tangents: list[Tensor]
    grads: dict[str, Tensor | None]

    @classmethod
    def of(cls, region: Region, given: Sequence[Any]) -> _Data:
        generator = torch.Generator().manual_seed(_SEED)
        inputs = [
            _random(value, generator) if node.meta["requires_grad"] else _plain(value)
            for node, value in zip(region.placeholders, given, strict=True)
        ]
        outputs = list(run_graph(region.module, inputs))
        tangents = [_random(value, generator).detach() for value in outputs]
        pairs = [pair for pair in zip(outputs, tangents, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        grads = {
            name: value.grad if isinstance(value, Tensor) else None
            for name, value in zip(_names(region), inputs, strict=True)
        }
        return cls([_plain(v) for v in inputs], [v.detach() for v in outputs], tangents, grads)


def _names(region: Region) -> list[str]:
    kinds = zip(region.input_kinds, region.input_names, strict=True)
    return [f"{kind} {name}" for kind, name in kinds]


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _random(value: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers, of a size at which products of matrices stay of order one."""
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    scale = 1 / math.sqrt(min(value.shape[-1], 64)) if value.dim() == 2 else 1.0
    return (noise * scale).to(value).requires_grad_()


def _check(
    stage: str,
    whole: Region,
    name: str,
    compiled: CompiledProgram,
    data: _Data,
    tolerance: float,
) -> Comparison:
    try:
        errors = _errors(whole, name, compiled, data)
    except (SPCompilerError, RuntimeError) as error:
        return Comparison(stage, name, math.inf, tolerance, message=str(error))
    where = max(errors, key=errors.__getitem__, default="")
    return Comparison(stage, name, errors.get(where, 0.0), tolerance, where)


def _errors(whole: Region, name: str, compiled: CompiledProgram, data: _Data) -> dict[str, float]:
    region = compiled.regions[name].region
    code, world_size = compiled.codes[name], compiled.world_size
    places, kinds = region.input_placements, region.output_placements
    inputs = [
        _rows(value, node, placement, world_size, pad=1.0) if isinstance(value, Tensor) else value
        for value, node, placement in zip(data.inputs, region.placeholders, places, strict=True)
    ]
    tangents = _tangents(region, data, world_size)
    with simulated_ranks(world_size) as tp, torch.no_grad():
        found, saved = code.forward(
            tp, *[scatter(v, p, world_size) for v, p in zip(inputs, places, strict=True)]
        )
        grads: Sequence[Any] = [None] * len(inputs)
        flows = compiled.differentiable[name]
        if any(flows):
            parts = [
                scatter(tangent, placement.dual, world_size)
                for tangent, placement, flow in zip(tangents, kinds, flows, strict=True)
                if flow
            ]
            grads = code.backward(tp, saved, *parts)
        # Sharding may return an output a second time, placed differently: the whole step sees it.
        outputs = [
            _joined(value, placement, true)
            for value, placement, true in zip(found, kinds, data.outputs, strict=False)
        ]
        named = {
            name: None if grad is None else _joined(grad, placement.dual, true)
            for name, grad, placement, true in zip(
                _names(whole), grads, places, data.inputs, strict=True
            )
        }
    errors = output_errors(outputs, data.outputs)
    of_grads = gradient_errors(named, data.grads)
    return errors | {f"gradient of {name}": error for name, error in of_grads.items()}


def _tangents(region: Region, data: _Data, world_size: int) -> list[Tensor]:
    """For each output of the sharded region; nothing flows into one that is returned again."""
    given = zip(data.tangents, region.outputs, region.output_placements, strict=False)
    found = [_rows(tangent, node, place, world_size, pad=0.0) for tangent, node, place in given]
    for node, placement in list(zip(region.outputs, region.output_placements, strict=True))[
        len(found) :
    ]:
        value = node.meta["val"]
        shape = placement.global_shape(tuple(value.shape), world_size)
        found.append(torch.zeros(shape, dtype=value.dtype))
    return found


def _rows(
    value: Tensor, node: Node, placement: Placement, world_size: int, *, pad: float
) -> Tensor:
    """``value`` as the sharded region knows it: tokens flattened to rows, padded with ``pad``."""
    local = tuple(node.meta["val"].shape)
    if placement.kind != "S" or placement.dim or placement.padding(world_size):
        return value
    rows = value.reshape(-1, *local[1:]) if len(local) < value.dim() else value
    missing = local[0] * world_size - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), pad)])


def _joined(local: Tensor, placement: Placement, true: Tensor) -> Tensor:
    """The whole value, without padding, shaped as ``true``."""
    joined = gather_check(local, placement)
    rows = math.prod(true.shape[: true.dim() - joined.dim() + 1])
    if joined.dim() and placement.kind == "S" and joined.shape[0] > rows:
        joined = joined[:rows]
    return joined.reshape(true.shape)
