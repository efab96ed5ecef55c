"""The autograd functions of a compiled program: region calls, and use of replicated parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from sp_compiler.errors import UnsupportedError
from sp_compiler.runtime.communicator import Communicator
from sp_compiler.runtime.deferred import DeferredGradients
from sp_compiler.runtime.padding import padded_part

if TYPE_CHECKING:
    from sp_compiler.runtime.executor import RegionRunner


def local_tensor(value: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def refuse_transforms(values: Iterable[Any]) -> None:
    """Raise :class:`UnsupportedError` where a program would be transformed, not just run.

    ``values``: what it is called with, for a dual number may be among them.
    """
    transformed = torch._C._are_functorch_transforms_active()
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


class RegionFunction(torch.autograd.Function):
    """One call of a region: ``apply(runner, owners, *inputs) -> outputs``."""

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
        given = [index for index, grad in enumerate(grads) if grad is not None]
        num_inputs = len(ctx.needs_input_grad) - 2
        if not given:
            return (None,) * (num_inputs + 2)
        from_loss = runner.loss_backward
        with torch.no_grad():
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
    so the DTensor is kept in its stead. The padding of a part is put on again.
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
    values = [local_tensor(value) for value in ctx.saved_tensors]
    for position, placement in ctx.padded.items():
        values[position] = padded_part(values[position], placement, ctx.runner.tp.world)
    for index, other in ctx.others.items():
        values.insert(index, other)
    return tuple(values)


class ReplicateParameters(torch.autograd.Function):
    """Invariant parameters as replicated values; backward reduces their gradients together.

    ``apply(tp, deferred, names, *parameters)``; one all-reduce for each dtype. While ``deferred``
    is enabled the gradients are put there and the parameters get none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tp: Communicator,
        deferred: DeferredGradients,
        names: tuple[str, ...],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.deferred, ctx.names = tp, deferred, names
        ctx.specs = tuple(getattr(parameter, "_spec", None) for parameter in parameters)
        ctx.set_materialize_grads(False)
        return tuple(local_tensor(parameter).detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            if ctx.deferred.enabled:
                for name, grad in zip(ctx.names, grads, strict=True):
                    if grad is not None:
                        ctx.deferred.add(name, grad)
                return (None, None, None, *[None] * len(grads))
            whole = [
                ctx.deferred.take(name, grad) for name, grad in zip(ctx.names, grads, strict=True)
            ]
            reduced = reduce_gradients(ctx.tp, whole)
            results = [
                DTensor(grad, spec, requires_grad=False)
                if grad is not None and spec is not None
                else grad
                for grad, spec in zip(reduced, ctx.specs, strict=True)
            ]
        return (None, None, None, *forbid_double_backward(results, grads))


def reduce_gradients(tp: Communicator, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Sums over ranks of partial gradients, in one all-reduce for each dtype."""
    result: list[Tensor | None] = [None] * len(grads)
    by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for index, grad in enumerate(grads):
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).append((index, grad))
    for parts in by_dtype.values():
        flat = torch.cat([part.reshape(-1) for _, part in parts])
        pieces = tp.all_reduce(flat, "P", "I").split([part.numel() for _, part in parts])
        for (index, part), piece in zip(parts, pieces, strict=True):
            # A copy: views would share one version counter and keep the whole bucket alive.
            result[index] = piece.clone().view(part.shape)
    return result


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
