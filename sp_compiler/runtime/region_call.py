"""Calls of a region: its runner, and the autograd function that records it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import LossBackward, RegionCode
from sp_compiler.ops.communicator import Communicator
from sp_compiler.runtime.padding import padded_part, without_rank_padding


def local_tensor(value: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def refuse_transforms(values: Iterable[Any]) -> None:
    """Raise :class:`UnsupportedError` where a program would be transformed, not just run.

    ``values``: what it is called with, for a dual number may be among them.
    """
    transformed = torch._C._are_functorch_transforms_active()
    # Every call comes here: two reads where nothing is transformed.
    if not transformed and forward_ad._current_level < 0:
        return
    if transformed or any(
        isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
        for value in map(local_tensor, values)
    ):
        raise UnsupportedError(
            "transforms of torch.func (grad, vmap, jvp, ...) and forward-mode AD cannot see "
            "through a compiled model, whose code brings its own backward; use loss.backward() or "
            "torch.autograd.grad, or the original model"
        )


@dataclass(frozen=True)
class RegionRunner:
    """Executes one region on its inputs, recording it for autograd where a gradient is needed.

    ``padded``: which inputs are padded shards of parameters, and how they are placed.
    """

    code: RegionCode
    differentiable: tuple[bool, ...]
    tp: Communicator
    loss_backward: LossBackward | None = None
    padded: Mapping[int, Placement] = field(default_factory=dict)

    def __call__(
        self, inputs: Sequence[Any], owners: Sequence[Tensor | None] | None = None
    ) -> tuple[Any, ...]:
        """Outputs of the region.

        ``owners`` names, where given, for each input the parameter that it aliases, so that an
        in-place change of the parameter between forward and backward is found.
        """
        if torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in inputs
        ):
            return RegionFunction.apply(self, owners, *inputs)
        outputs, _ = self.code.forward(self.tp, *self.operands(inputs))
        return outputs

    def operands(self, inputs: Sequence[Any]) -> list[Any]:
        """This rank's part of each input, padding included."""
        parts = [local_tensor(value) for value in inputs]
        for index, placement in self.padded.items():
            parts[index] = padded_part(parts[index], placement, self.tp.world_size)
        return parts

    def without_padding(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of input ``index`` as the parameter is stored."""
        placement = self.padded.get(index)
        if placement is None:
            return grad
        assert isinstance(self.tp.rank, int)
        return without_rank_padding(grad, placement, self.tp.rank, self.tp.world_size)


class RegionFunction(torch.autograd.Function):
    """Call of a region: ``apply(runner, owners, *inputs) -> outputs``."""

    @staticmethod
    def forward(
        ctx: Any, runner: RegionRunner, owners: Sequence[Tensor | None] | None, *inputs: Any
    ) -> tuple[Any, ...]:
        locals_ = runner.operands(inputs)
        outputs, saved = runner.code.forward(runner.tp, *locals_)
        outputs = _distinct(outputs, locals_, inputs)
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[out for out, used in zip(outputs, runner.differentiable, strict=True) if not used]
        )
        # Shapes instead of outputs, which would stay alive until backward.
        ctx.tangent_metas = [
            (out.shape, out.dtype, out.device)
            for out, used in zip(outputs, runner.differentiable, strict=True)
            if used
        ]
        _save(ctx, saved, locals_, owners if owners is not None else inputs)
        ctx.parameters = tuple(
            index for index, value in enumerate(inputs) if isinstance(value, DTensor)
        )
        ctx.parameter_specs = tuple(inputs[index]._spec for index in ctx.parameters)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        runner = ctx.runner
        used = [grad for grad, flows in zip(grads, runner.differentiable, strict=True) if flows]
        # Gradients that nobody asks for stay None (materialize_grads is off) and cost nothing.
        given = [index for index, grad in enumerate(grads) if grad is not None]
        num_inputs = len(ctx.needs_input_grad) - 2
        if not given:
            return (None,) * (num_inputs + 2)
        from_loss = runner.loss_backward
        with torch.no_grad():
            # The usual training step: no gradient but the loss's, so none of zeros flows through.
            if from_loss is not None and given == [from_loss.output]:
                found = from_loss.run(runner.tp, _saved(ctx), _whole(grads[from_loss.output]))
            else:
                tangents = _tangents(used, ctx.tangent_metas)
                found = runner.code.backward(runner.tp, _saved(ctx), *tangents)
        results = list(found)
        needed = ctx.needs_input_grad[2:]
        results = [grad if need else None for grad, need in zip(results, needed, strict=True)]
        for index, spec in zip(ctx.parameters, ctx.parameter_specs, strict=True):
            if results[index] is not None:
                local = runner.without_padding(index, results[index]).contiguous()
                # Without from_local, whose own node and checks take longer than a small kernel.
                results[index] = DTensor(local, spec, requires_grad=False)
        return (None, None, *forbid_double_backward(results, used))


def _tangents(grads: Sequence[Tensor | None], metas: Sequence[Any]) -> list[Tensor]:
    return [
        torch.zeros(meta[0], dtype=meta[1], device=meta[2])
        if grad is None
        else _whole(grad).contiguous()
        for grad, meta in zip(grads, metas, strict=True)
    ]


def _whole(grad: Tensor) -> Tensor:
    """A gradient from a computation that mixed an output with DTensors, on every rank."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _distinct(
    outputs: Sequence[Any], locals_: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Outputs as different objects, none a parameter's own local part.

    Autograd writes one history into each object that a function returns.
    """
    seen = {id(local) for local, value in zip(locals_, inputs, strict=True) if local is not value}
    if not seen and len({id(out) for out in outputs}) == len(outputs):
        return tuple(outputs)
    result = []
    for out in outputs:
        result.append(out.view_as(out) if id(out) in seen else out)
        seen.add(id(out))
    return tuple(result)


def _save(ctx: Any, saved: Sequence[Any], locals_: Sequence[Any], owners: Sequence[Any]) -> None:
    """Keep ``saved`` for backward, tensors where autograd watches them for in-place changes.

    A local part of a DTensor does not see that the DTensor is changed in place (its version stays),
    so the DTensor is kept instead. The padding of a part is put on again.
    """
    owner_of = {
        id(local): owner
        for local, owner in zip(locals_, owners, strict=True)
        if isinstance(owner, DTensor)
    }
    tensors = [value for value in saved if isinstance(value, Tensor)]
    ctx.save_for_backward(*[owner_of.get(id(value), value) for value in tensors])
    position_of = {id(value): position for position, value in enumerate(tensors)}
    padded = [(id(locals_[index]), place) for index, place in ctx.runner.padded.items()]
    ctx.padded = {position_of[key]: place for key, place in padded if key in position_of}
    ctx.others = {
        index: value for index, value in enumerate(saved) if not isinstance(value, Tensor)
    }


def _saved(ctx: Any) -> tuple[Any, ...]:
    # Reading saved_tensors is what raises for a parameter that was changed since.
    values = [local_tensor(value) for value in ctx.saved_tensors]
    for position, placement in ctx.padded.items():
        values[position] = padded_part(values[position], placement, ctx.runner.tp.world_size)
    for index, other in ctx.others.items():
        values.insert(index, other)
    return tuple(values)


class _NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *grads: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "a gradient of a gradient (create_graph=True) through a compiled model is not "
            "supported: its backward is generated code without a backward of its own; "
            "use the original model for this"
        )


def forbid_double_backward(
    results: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """With ``create_graph``: results whose own backward raises, instead of being constants."""
    sources = [grad for grad in grads if grad is not None and grad.requires_grad]
    if not torch.is_grad_enabled():
        return list(results)
    return [
        result if result is None else _NoDoubleBackward.apply(result.requires_grad_(), *sources)
        for result in results
    ]
