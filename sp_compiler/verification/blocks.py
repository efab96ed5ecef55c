"""Comparison of each distinct block with the unsharded one, forward and backward, on random data.

It finds errors that a full step hides: a conversion whose forward is right but whose gradient is
wrong, or a gradient that differs between ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Program, Region
from sp_compiler.rules.registry import schema_name
from sp_compiler.verification.first_wrong import (
    differs,
    first_wrong,
    first_wrong_gradient,
    gradients_of,
    operator_text,
)
from sp_compiler.verification.interpret import run_graph
from sp_compiler.verification.judge import Numbers, Precision, Reference
from sp_compiler.verification.random_values import SPREADS, Spread, random_like
from sp_compiler.verification.report import Comparison
from sp_compiler.verification.simulate import gather_check, scatter, simulated_ranks

# Fixed, so that a report can be reproduced and two passes get the same values.
_SEED = 7


def check_blocks(
    program: Program,
    variants: Mapping[str, CompiledProgram],
    call_data: Callable[[int, Spread], BlockData],
    *,
    operators: Set[str] | None = None,
) -> Iterator[Comparison]:
    """Compare every region after each pass, in all its splits, with the unsharded one.

    Args:
        program: the program of full tensors, with separate outputs of the model, as in sharding:
            see :func:`~sp_compiler.passes.sharding.outputs.route_outputs`.
        variants: the compiled program with the code to run, by pass.
        call_data: returns the inputs and tangents of a call of ``program``.
        operators: compare only blocks with one of these operators, by schema name.
    """
    for region in program.regions:
        used = set(map(schema_name, region.module.graph.nodes))
        if operators is None or operators & used:
            yield from Block.of(program, region, call_data, floors=True).rows(program, variants)


@dataclass(frozen=True)
class BlockData:
    """The inputs of one unsharded region, and a float64 tangent per output."""

    inputs: Sequence[Any]
    tangents: Sequence[Tensor]

    @classmethod
    def random(cls, region: Region, given: Sequence[Any], spread: Spread) -> BlockData:
        """Return the ``given`` inputs, with random values for those that require a gradient."""
        generator = torch.Generator().manual_seed(_SEED)
        inputs = [
            # Values without gradients (masks, positions, tables) are real ones: with random masks,
            # some rows could attend to nothing.
            random_like(value, generator, spread=spread) if node.meta["requires_grad"] else value
            for node, value in zip(region.placeholders, given, strict=True)
        ]
        # Not ones, since a sum would hide swapped rows, and not only from the loss, which would
        # hide errors that do not affect it.
        tangents = [random_like(node.meta["val"], generator).detach() for node in region.outputs]
        return cls(inputs, tangents)


@dataclass(frozen=True)
class Block:
    """Inputs and tangents of one unsharded region, and its results.

    Attributes:
        inputs: random values for inputs that require gradients, else the given values; in the
            precision of the reference.
        tangents: tangents of the outputs, in float64.
    """

    region: Region
    inputs: list[Any]
    tangents: list[Tensor]
    reference: Reference

    @classmethod
    def of(
        cls,
        program: Program,
        region: Region,
        call_data: Callable[[int, Spread], BlockData],
        *,
        floors: bool,
    ) -> Block:
        """Run ``region`` unsharded.

        Arguments are those of :func:`check_blocks`; ``floors``: whether to measure noise floors.
        """
        # The first call represents all: they have the same graph, and random parameters.
        index = next(i for i, call in enumerate(program.calls) if call.region is region)
        for spread in SPREADS:
            block = cls._of(region, call_data(index, spread), floors)
            if block.reference.true.is_defined:
                break
        return block

    @classmethod
    def _of(cls, region: Region, data: BlockData, floors: bool) -> Block:
        inputs = list(map(_plain, data.inputs))

        def run(precision: Precision) -> Numbers:
            leaves = _leaves(region, _all_in(precision, region, inputs))
            with precision.entered():
                outputs = list(run_graph(region.module, leaves))
                pairs = [
                    (value, tangent.to(value.dtype))
                    for value, tangent in zip(outputs, data.tangents, strict=True)
                    if value.requires_grad
                ]
                if pairs:
                    torch.autograd.backward([root for root, _ in pairs], [t for _, t in pairs])
            grads = {
                name: value.grad if isinstance(value, Tensor) else None
                for name, value in zip(_names(region), leaves, strict=True)
            }
            return Numbers([value.detach() for value in outputs], grads)

        reference = Reference.of(run, floors=floors)
        held = _all_in(reference.precision, region, inputs)
        return cls(region, held, list(data.tangents), reference)

    def rows(
        self, program: Program, variants: Mapping[str, CompiledProgram]
    ) -> Iterator[Comparison]:
        """Compare with the region in all its splits after each pass."""
        for stage, compiled in variants.items():
            pairs = zip(program.calls, compiled.program.calls, strict=True)
            ways = {split.region.name: None for call, split in pairs if call.region is self.region}
            for name in ways:
                yield self.compare(stage, name, compiled)

    def compare(self, stage: str, name: str, compiled: CompiledProgram) -> Comparison:
        """Compare with the region ``name`` of a compiled program on simulated ranks."""
        try:
            row = self.reference.compare(stage, name, self._sharded(name, compiled))
        except Exception as error:  # wrong code may raise anything
            # Another row of the report, so that later passes and other blocks are still compared.
            row = self.reference.failed(stage, name, error)
        # Later passes rewrite nodes, which then no longer correspond to the unsharded graph.
        if row.ok or stage != Pass.SHARD:
            return row
        with contextlib.suppress(Exception):  # it may not run at all
            row = replace(row, operator=self._first_wrong(name, compiled))
        return row

    def _first_wrong(self, name: str, compiled: CompiledProgram) -> str:
        """Return the first wrong operator of the sharded region, "" if there is none."""
        region, world_size = compiled.regions[name].region, compiled.world_size
        precision = self.reference.precision
        expected: dict[str, Any] = {}
        leaves = _leaves(self.region, _all_in(precision, self.region, self.inputs))
        with precision.entered():
            results = run_graph(self.region.module, leaves, computed=expected)
            tangents = [
                tangent.to(value.dtype)
                for value, tangent in zip(results, self.tangents, strict=True)
            ]
            true_grads = gradients_of(expected, results, tangents)
        actual: dict[str, Any] = {}
        inputs, full_tangents = self._given(region, world_size)
        with simulated_ranks(world_size) as tp, precision.entered(), torch.enable_grad():
            parts = _leaves(self.region, _scattered(inputs, region.input_placements, world_size))
            outputs = run_graph(region.module, parts, tp, actual)
            duals = [placement.dual for placement in region.output_placements]
            grads = gradients_of(actual, outputs, _scattered(full_tangents, duals, world_size))
            with torch.no_grad():
                limits = self.reference.tolerance, _joined
                wrong = first_wrong(region, actual, expected, *limits)
                if wrong is not None:
                    return operator_text(wrong)
                # Every value is right where it is computed, so an output may be converted wrongly.
                for node, value, placement, true in zip(
                    region.outputs, outputs, region.output_placements, results, strict=True
                ):
                    if differs(placement, value, true, *limits):
                        return f"returned value of {operator_text(node)}"
                wrong = first_wrong_gradient(region, grads, true_grads, *limits)
        return "" if wrong is None else f"backward of {operator_text(wrong)}"

    def _given(self, region: Region, world_size: int) -> tuple[list[Any], list[Tensor]]:
        """Return full inputs and tangents in the form of the sharded ``region``."""
        precision, places = self.reference.precision, region.input_placements
        inputs = [
            # Padded with ones: zeros would give NaN if a row is divided by its norm.
            _rows(value, node, placement, world_size, pad=1.0)
            if isinstance(value, Tensor)
            else value
            for value, node, placement in zip(self.inputs, region.placeholders, places, strict=True)
        ]
        tangents = [
            # Padded with zeros: no gradient flows into rows that are dropped.
            _rows(tangent, node, place, world_size, pad=0.0).to(
                precision.dtype(node.meta["val"].dtype)
            )
            for tangent, node, place in zip(
                self.tangents, region.outputs, region.output_placements, strict=True
            )
        ]
        return inputs, tangents

    def _sharded(self, name: str, compiled: CompiledProgram) -> Numbers:
        region = compiled.regions[name].region
        code, world_size = compiled.codes[name], compiled.world_size
        places, kinds = region.input_placements, region.output_placements
        precision, true = self.reference.precision, self.reference.true
        inputs, tangents = self._given(region, world_size)
        with simulated_ranks(world_size) as tp, precision.entered(), torch.no_grad():
            results, saved = code.forward(tp, *_scattered(inputs, places, world_size))
            grads: Sequence[Any] = [None] * len(inputs)
            flows = compiled.differentiable[name]
            # A block whose outputs are only masks or positions has no backward.
            if any(flows):
                parts = [
                    # The placement of a gradient is the dual: replicated for a partial sum.
                    scatter(tangent, placement.dual, world_size)
                    for tangent, placement, flow in zip(tangents, kinds, flows, strict=True)
                    if flow
                ]
                grads = code.backward(tp, saved, *parts)
            outputs = [
                _joined(value, placement, expected)
                for value, placement, expected in zip(results, kinds, true.outputs, strict=True)
            ]
            named = {
                name: None if grad is None else _joined(grad, placement.dual, full)
                for name, grad, placement, full in zip(
                    _names(self.region), grads, places, self.inputs, strict=True
                )
            }
        return Numbers(outputs, named)


def _scattered(
    values: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> list[Any]:
    return [  # a size stays a number
        scatter(value, placement, world_size) if isinstance(value, Tensor) else value
        for value, placement in zip(values, placements, strict=True)
    ]


def _names(region: Region) -> list[str]:
    kinds = zip(region.input_kinds, region.input_names, strict=True)
    return [f"{kind} {name}" for kind, name in kinds]


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _leaves(region: Region, values: Sequence[Any]) -> list[Any]:
    return [
        value.requires_grad_(node.meta["requires_grad"]) if isinstance(value, Tensor) else value
        for value, node in zip(values, region.placeholders, strict=True)
    ]


def _all_in(precision: Precision, region: Region, values: Sequence[Any]) -> list[Any]:
    """Return copies of the inputs of ``region``."""
    return [
        # Leaves of several runs must share neither gradients nor memory.
        value.detach().to(precision.dtype(node.meta["val"].dtype), copy=True)
        if isinstance(value, Tensor) and isinstance(node.meta["val"], Tensor)
        else value
        for value, node in zip(values, region.placeholders, strict=True)
    ]


def _rows(
    value: Tensor, node: Node, placement: Placement, world_size: int, *, pad: float
) -> Tensor:
    """Return ``value`` in the sharded region's form: tokens flattened to rows, padded with
    ``pad``."""
    local = tuple(node.meta["val"].shape)
    # Only rows of tokens are flattened; other dims, and parts with their own padding, stay.
    if placement.kind != "S" or placement.dim or placement.padding(world_size):
        return value
    rows = value.reshape(-1, *local[1:]) if len(local) < value.dim() else value
    missing = local[0] * world_size - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), pad)])


def _joined(local: Tensor, placement: Placement, true: Tensor) -> Tensor:
    """Return the full value, without padding, in the shape of ``true``."""
    joined = gather_check(local, placement)
    # The number of rows is the product of the leading dims that they merge.
    rows = math.prod(true.shape[: true.dim() - joined.dim() + 1])
    if joined.dim() and placement.kind == "S" and joined.shape[0] > rows:
        joined = joined[:rows]
    return joined.reshape(true.shape)
