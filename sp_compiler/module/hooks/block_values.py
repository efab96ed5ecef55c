"""The values of a block as hooks see them: full on every rank, as on one device.

A block computes with parts of its values, for example with flattened rows of tokens that have lost
their shape. Values are gathered for a hook. Each rank takes its part of the values that the hook
returns, or changes in place. Both directions are differentiable, by the conversions of
:mod:`sp_compiler.ops.convert`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import I, Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Ref
from sp_compiler.ir.symbolic import evaluate
from sp_compiler.ir.text import describe_tensor
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.convert import convert


class _Gathered(torch.autograd.Function):
    """The full value on every rank, with the same gradient on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tp: Communicator, placement: Placement) -> Tensor:
        ctx.tp, ctx.placement = tp, placement
        # A copy of a value that is full already, since a hook may change it in place.
        return part.clone() if placement.is_replicated else convert(tp, part, str(placement), "I")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Part.apply(grad, ctx.tp, ctx.placement.dual), None, None


class _Part(torch.autograd.Function):
    """This rank's part of a full value that is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, tp: Communicator, placement: Placement) -> Tensor:
        ctx.tp, ctx.placement = tp, placement
        if placement.kind == "P":  # parts whose sum is the value
            return full.clone() if tp.rank == 0 else torch.zeros_like(full)
        return full.clone() if placement.is_replicated else convert(tp, full, "I", str(placement))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Gathered.apply(grad, ctx.tp, ctx.placement.dual), None, None


@dataclass(frozen=True)
class _Form:
    """Placement of a value, and the shape of the full one."""

    placement: Placement
    shape: tuple[int, ...]

    def gathered(self, tp: Communicator, part: Tensor) -> Tensor:
        """Return the full value; ``part`` itself if it is full."""
        if self.placement == I:
            return part
        full: Tensor = _Gathered.apply(part, tp, self.placement)
        # Rows form has one dim for several of the value's dims, and may end with padding.
        num_rows = math.prod(self.shape[: len(self.shape) - full.dim() + 1])
        return full if full.shape == self.shape else full[:num_rows].reshape(self.shape)

    def part_of(self, tp: Communicator, full: Tensor, like: Tensor, *, is_gradient: bool) -> Tensor:
        """Return this rank's part of ``full``, in the shape of ``like``."""
        if self.placement == I:
            return full
        num_row_dims = len(self.shape) - like.dim() + 1
        is_sharded = self.placement.is_sharded
        if is_sharded and self.placement.global_shape(like.shape, tp.world_size) != self.shape:
            full = full.reshape(-1, *self.shape[num_row_dims:])
            missing = like.shape[0] * tp.world_size - full.shape[0]
            # Padded with copies of the last row, as in compiled code: these do not cause NaN.
            last = full[-1:].detach()
            padding = torch.zeros_like(last) if is_gradient else last
            full = torch.cat([full, padding.expand(missing, *last.shape[1:])])
        part: Tensor = _Part.apply(full, tp, self.placement)
        return part

    @property
    def of_gradient(self) -> _Form:
        return _Form(self.placement.dual, self.shape)


@dataclass(frozen=True)
class Shown:
    """Values of a block, and the full values that a hook sees.

    Attributes:
        tp: communicator of this rank.
        path: path of the block.
        values: this rank's parts.
        forms: their placements and full shapes; ``None`` for values that are not tensors.
        positions: positions of the values that hooks see, in their order.
        full: these values in full.
        are_gradients: whether they are the gradients of the block's values.
        need_gradients: whether each of ``full`` required a gradient before the hook.
        versions: version counters of ``full`` before the hook.
    """

    tp: Communicator
    path: str
    values: tuple[Any, ...]
    forms: Sequence[_Form | None]
    positions: Sequence[int]
    full: tuple[Any, ...]
    are_gradients: bool
    need_gradients: tuple[bool, ...]
    versions: tuple[int | None, ...]

    def through(self) -> Shown:
        """Return the values as parts of the full ones, which then take part in the backward: hooks
        on tensors, and ``retain_grad``, see full gradients too."""
        return self.after(None)

    def after(self, result: Any) -> Shown:
        """Return the values after a hook, which returned ``result`` (``None`` for nothing) and may
        have changed values in place.

        Raises:
            UnsupportedError: the result is not tensors of the shapes that the hook saw, or a tensor
                requires a gradient where the compiled code has none.
        """
        given = self.full if result is None else result
        if not isinstance(given, (tuple, list)) or len(given) != len(self.full):
            num = len(given) if isinstance(given, (tuple, list)) else 1
            raise self._refusal(f"{num} values instead of {len(self.full)}")
        values = list(self.values)
        for index, (position, new) in enumerate(zip(self.positions, given, strict=True)):
            values[position] = self._part(position, new, index)
        return replace(
            self,
            values=tuple(values),
            full=tuple(given),
            need_gradients=tuple(map(_needs_gradient, given)),
            versions=tuple(map(_num_changes, given)),
        )

    def _part(self, position: int, new: Any, index: int) -> Any:
        value, form, seen = self.values[position], self.forms[position], self.full[index]
        # Torch itself checks gradients.
        if isinstance(seen, Tensor) and not self.are_gradients and _text(new) != _text(seen):
            raise self._refusal(f"{_text(new)} instead of {_text(seen)}")
        # The capture has decided which values the compiled code differentiates.
        if _needs_gradient(new) and not self.need_gradients[index] and not self.are_gradients:
            raise self._refusal(
                "a tensor that requires a gradient where the model's own tensor does not (nothing "
                "before it is trained), so its gradient would be lost; make what the hook adds "
                "a part of the model before sp_compiler.compile, or keep a parameter before it "
                "trainable",
                why="",
            )
        if form is None or new is None:
            return new
        # Even if the hook returned the same tensor: not every in-place change is counted.
        return form.part_of(self.tp, new, value, is_gradient=self.are_gradients)

    def require_unchanged(self) -> None:
        """Raise an error if a hook changed values in place that have been used already."""
        pairs = zip(self.positions, self.full, self.versions, strict=True)
        if any(
            seen is not self.values[position] and _num_changes(seen) != version
            for position, seen, version in pairs
        ):
            raise UnsupportedError(
                f"a forward hook on {self.path!r} changed an input of the block in place, after "
                "the block has read it: return another output, or change inputs in a forward "
                "pre-hook"
            )

    def _refusal(
        self, what: str, why: str = ": the compiled code needs values like those that the hook saw"
    ) -> UnsupportedError:
        return UnsupportedError(f"a hook on {self.path!r} returned {what}{why}")


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _num_changes(value: Any) -> int | None:
    """Return the version counter of a tensor; ``None`` if it has none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return describe_tensor(value)


@dataclass(frozen=True)
class BlockForms:
    """How a rank holds the values of one call of a block.

    Attributes:
        tp: communicator of this rank.
        path: path of the block.
        given: form of each argument, without parameters and sizes.
        seen: positions of the arguments that hooks see: results of other layers, then the model's
            inputs.
        made: form of each value that it returns.
        results: positions of the results that hooks see: those that other layers read, or that the
            model returns. The others are new values of buffers and attributes, which the model's
            own forward does not return.
    """

    tp: Communicator
    path: str
    given: Sequence[_Form | None]
    seen: Sequence[int]
    made: Sequence[_Form | None]
    results: Sequence[int]

    @classmethod
    def of(
        cls, tp: Communicator, compiled: CompiledProgram, index: int, leaves: Sequence[Any]
    ) -> BlockForms:
        """Return those of call ``index`` of ``compiled`` for the flattened inputs ``leaves``."""
        call, sizes = compiled.program.calls[index], compiled.program.sizes
        if any(each.name == Pass.HALF_BATCHES and each.rewrites for each in compiled.reports):
            raise UnsupportedError(
                f"a hook on {call.path!r} would see two half batches: the model was compiled with "
                "half_batches; leave that out where hooks look at blocks"
            )
        open_dims = () if sizes is None else sizes.open
        binding = {each.symbol: int(leaves[each.leaf].shape[each.dim]) for each in open_dims}

        def forms(
            placements: Sequence[Placement], shapes: Sequence[tuple[int, ...] | None]
        ) -> list[_Form | None]:
            return [
                None if shape is None else _Form(placement, tuple(evaluate(shape, binding)))
                for placement, shape in zip(placements, shapes, strict=True)
            ]

        region = call.region
        given = forms(region.input_placements, region.input_shapes)
        values = [
            (kind, form)
            for kind, form in zip(region.input_kinds, given, strict=True)
            if kind not in ("param", "size")
        ]
        seen = [
            i
            for wanted in ("call", "input")
            for i, (kind, _) in enumerate(values)
            if kind == wanted
        ]
        made = forms(region.output_placements, region.output_shapes)
        program = compiled.program
        own_outputs = program.outputs[: program.out_spec.num_leaves]
        readers = [*own_outputs, *(ref for each in program.calls for ref in each.args)]
        read = {
            ref.output
            for ref in readers
            if isinstance(ref, Ref) and ref.kind == "call" and ref.index == index
        }
        results = sorted(read) or range(len(made))
        return cls(tp, call.path, [form for _, form in values], seen, made, results)

    def inputs(self, values: Sequence[Any], *, are_gradients: bool = False) -> Shown:
        """Return the inputs of the block as hooks see them."""
        return self._shown(values, self.given, self.seen, are_gradients)

    def outputs(self, values: Sequence[Any], *, are_gradients: bool = False) -> Shown:
        """Return the outputs of the block as hooks see them."""
        return self._shown(values, self.made, self.results, are_gradients)

    def _shown(
        self,
        values: Sequence[Any],
        forms: Sequence[_Form | None],
        positions: Sequence[int],
        are_gradients: bool,
    ) -> Shown:
        if self.tp.world_size == 1:
            forms = [None] * len(values)
        elif are_gradients:
            forms = [None if form is None else form.of_gradient for form in forms]
        pairs = [(values[position], forms[position]) for position in positions]
        full = tuple(
            form.gathered(self.tp, value) if form is not None and value is not None else value
            for value, form in pairs
        )
        return Shown(
            tp=self.tp,
            path=self.path,
            values=tuple(values),
            forms=forms,
            positions=positions,
            full=full,
            are_gradients=are_gradients,
            need_gradients=tuple(map(_needs_gradient, full)),
            versions=tuple(map(_num_changes, full)),
        )
