"""Calls of a region: its runner, and the autograd function that records it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from sp_compiler.base.autocast import with_captured_casts
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import LossBackward, Reached, RegionCode
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu.host_memory import HostTrip
from sp_compiler.runtime.failures.origins import NAMING_ORIGINS
from sp_compiler.runtime.padding import padded_part, without_rank_padding
from sp_compiler.runtime.parameter_gradients import (
    CompiledFunction,
    deliver,
    local_tensor,
    opaque,
    parameter_edges,
    refuse_batched,
    refuse_unreached,
)


def refuse_transforms(leaves: Iterable[Any], parameters: Callable[[], Iterable[Tensor]]) -> None:
    """Raise :class:`UnsupportedError` if a program would run under a transform.

    ``leaves`` and ``parameters()`` are its arguments, which may include dual tensors.
    """
    transformed = torch._C._are_functorch_transforms_active()
    # Every call comes here: only two reads if no transform is active.
    if not transformed and forward_ad._current_level < 0:
        return
    if transformed or any(
        isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
        for value in map(local_tensor, (*leaves, *parameters()))
    ):
        raise UnsupportedError(
            "transforms of torch.func (grad, vmap, jvp, ...) and forward-mode AD cannot see "
            "through a compiled model, whose code brings its own backward; use loss.backward() or "
            "torch.autograd.grad, or the original model"
        )


@dataclass(frozen=True)
class RegionRunner:
    """Executes one region on its inputs, and records it for autograd if a gradient is needed.

    ``parameters``: indices of inputs that are parameters. ``padded``: those that are padded shards,
    with their placements. ``partial``: those whose gradients are partial sums, if they are read as
    DTensors. ``reached_from``: where gradients come from.
    """

    code: RegionCode
    differentiable: tuple[bool, ...]
    tp: Communicator
    parameters: tuple[int, ...] = ()
    loss_backward: LossBackward | None = None
    padded: Mapping[int, Placement] = field(default_factory=dict)
    partial: frozenset[int] = frozenset()
    reached_from: Reached = field(default_factory=Reached)

    def __call__(self, inputs: Sequence[Any], owners: Sequence[Tensor]) -> tuple[Any, ...]:
        """Outputs of the region.

        ``owners``: for each input that is a parameter, the module's own tensor, so that an in-place
        change between forward and backward is detected.
        """
        if torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in inputs
        ):
            return self.record(inputs, owners)
        outputs, _ = self.forward(self.operands(inputs))
        return outputs

    def record(self, inputs: Sequence[Any], owners: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run the region, recorded for autograd."""
        results: tuple[Any, ...] = RegionFunction.apply(self, owners, *inputs)
        return results

    def forward(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return outputs of the region, and the tensors saved for backward."""
        # The code has its own backward. Dispatching each operator through autograd, only to find
        # nothing to record, takes a tenth of a small operator's time. Views and versions are still
        # tracked, because the caller may change saved tensors in place.
        with NAMING_ORIGINS, self._guard(torch._C._AutoDispatchBelowAutograd):
            return self.code.forward(self.tp, *operands)

    def put_away(self, saved: Sequence[Any]) -> Sequence[Any]:
        """Return what autograd saves in place of what the forward saved."""
        return saved

    def operands(self, inputs: Sequence[Any]) -> list[Any]:
        """This rank's part of each input, padding included."""
        # Inlined, like the reads of _local_tensor everywhere below: with small kernels, a step is
        # bound by the host, and a Python call per input would show.
        parts = [value._local_tensor if isinstance(value, DTensor) else value for value in inputs]
        for index, placement in self.padded.items():
            parts[index] = padded_part(parts[index], placement, self.tp.world_size)
        return parts

    def run_backward(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """Return one gradient per input of the region, this rank's part with padding.

        Args:
            saved: tensors saved by the forward.
            grads: gradient of every output, ``None`` if there is none; at least one is not.
            metas: shape, dtype and device of each differentiable output, in order.
        """
        # No views or versions are tracked: nothing that is computed here is saved.
        with NAMING_ORIGINS, self._guard(torch._C._AutoDispatchBelowADInplaceOrView):
            results = self.compute_gradients(saved, grads, metas)
        for index in self.unreached(grads):
            results[index] = None
        return results

    def compute_gradients(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """Return :meth:`run_backward`, with zeros for inputs that no gradient reaches."""
        loss = self.loss_backward
        # The usual training step: only the loss has a gradient, so no zeros have to flow.
        if loss is not None and all(
            (grad is not None) == (index == loss.output) for index, grad in enumerate(grads)
        ):
            tangents = [unsharded(grads[loss.output])]
            backward = loss.run
        else:
            tangents, backward = self.tangents(grads, metas), self.code.backward
        return list(backward(self.tp, saved, *tangents))

    def _guard(self, below: Callable[[], Any]) -> Any:
        # Verification differentiates a region with torch's own autograd.
        return nullcontext() if getattr(self.code, "uses_autograd", False) else below()

    def tangents(self, grads: Sequence[Tensor | None], metas: Sequence[Any]) -> list[Tensor]:
        """Return the gradients of the differentiable outputs, zeros for missing ones."""
        refuse_unreached(self.reached_from.functions, grads)
        flowing = [grad for grad, flows in zip(grads, self.differentiable, strict=True) if flows]
        return [
            torch.zeros(shape, dtype=dtype, device=device)
            if grad is None
            else unsharded(grad).contiguous()
            for grad, (shape, dtype, device) in zip(flowing, metas, strict=True)
        ]

    def unreached(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Return the inputs that no gradient in ``grads`` reaches; their computed gradients are
        zeros.

        Eager code has no gradients there, so an optimizer skips such parameters; with zeros it
        would decay them and apply momentum.
        """
        return [
            index
            for index, outputs in self.reached_from.inputs.items()
            if all(grads[output] is None for output in outputs)
        ]

    def without_padding(self, index: int, grad: Tensor | None) -> Tensor | None:
        """Return the gradient of the padded input ``index`` in the parameter's stored form."""
        if grad is None:
            return None
        assert isinstance(self.tp.rank, int)
        return without_rank_padding(grad, self.padded[index], self.tp.rank, self.tp.world_size)


@dataclass(frozen=True)
class OffloadingRunner(RegionRunner):
    """Runs one call of a region in a program that sends saved tensors to the host."""

    trip: HostTrip = field(kw_only=True)

    def put_away(self, saved: Sequence[Any]) -> Sequence[Any]:
        """As in the base class, with tensors on the host."""
        return self.trip.leave(saved)

    def run_backward(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """As in the base class."""
        return super().run_backward(self.trip.fetch(saved), grads, metas)


class Handed:
    """Values that the backward of one call has computed for another function.

    They belong to one run of backward: after a failed run the next one starts anew, in the same
    way on every rank. A hook may also run a backward of the same graph in the middle of another.
    """

    def __init__(self) -> None:
        self._values: dict[int, list[Any]] = {}  # by backward
        self._last = -1

    def put(self, values: list[Any]) -> None:
        """Keep ``values`` for the backward that runs now."""
        self._last = torch._C._current_graph_task_id()
        self._values[self._last] = values

    def take(self) -> list[Any] | None:
        """Return the values, which the caller owns from now on; ``None`` if there are none."""
        self._last = torch._C._current_graph_task_id()
        return self._values.pop(self._last, None)

    @property
    def is_done(self) -> bool:
        """Whether the backward that runs now was the last to put values here, or to take them."""
        return self._last == torch._C._current_graph_task_id()


@dataclass(frozen=True)
class LookAheadRunner(RegionRunner):
    """Runs one call of a region whose backward also recomputes for the call before it.

    ``before``: the autograd node of that call, if it calls the same region. It has the tensors
    that this backward reads, as long as its own backward may still run.
    """

    before: Any = field(kw_only=True)
    recomputed: Handed = field(default_factory=Handed, kw_only=True)

    def compute_gradients(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """As in the base class."""
        code: Any = self.code
        values = self.recomputed.take()
        if values is None:
            values = list(code.recompute(self.tp, saved))
        tangents, before = self.tangents(grads, metas), self.before
        # There is none, or its backward will not run.
        if (
            before is None
            or before.runner.recomputed.is_done
            or not torch._C._will_engine_execute_node(before)
        ):
            return list(code.backward_rest(self.tp, saved, values, *tangents))
        results, ahead = code.backward_ahead(self.tp, saved, values, _saved(before), *tangents)
        before.runner.recomputed.put(list(ahead))
        return list(results)


class RegionFunction(CompiledFunction):
    """Call of a region: ``apply(runner, owners, *inputs) -> outputs``."""

    @staticmethod
    def forward(
        ctx: Any, runner: RegionRunner, owners: Sequence[Tensor], *inputs: Any
    ) -> tuple[Any, ...]:
        locals_ = runner.operands(inputs)
        outputs, made = runner.forward(locals_)
        saved = runner.put_away(made)
        ctx.runner = runner
        # Gradients that are not needed stay None and cost nothing.
        ctx.set_materialize_grads(False)
        # The local part of a DTensor does not notice if the DTensor is changed in place (its own
        # version stays the same), so the DTensor is saved instead.
        owner_of = {
            id(locals_[index]): owner
            for index, owner in zip(runner.parameters, owners, strict=True)
        }
        # Rare: the same value is returned twice, or a parameter itself is.
        ids = {id(out) for out in outputs}
        if len(ids) < len(outputs) or not ids.isdisjoint(owner_of):
            outputs = _distinct(
                outputs,
                {id(locals_[i]) for i in runner.parameters if locals_[i] is not inputs[i]},
            )
        outputs = _changeable(outputs, locals_)
        if not all(runner.differentiable):
            ctx.mark_non_differentiable(
                *[out for out, used in zip(outputs, runner.differentiable, strict=True) if not used]
            )
        # Shapes instead of outputs, which would stay alive until backward.
        ctx.tangent_metas = [
            (out.shape, out.dtype, out.device)
            for out, used in zip(outputs, runner.differentiable, strict=True)
            if used
        ]
        ctx.others = [
            (position, value)
            for position, value in enumerate(saved)
            if not isinstance(value, Tensor)
        ]
        tensors = [value for value in saved if isinstance(value, Tensor)] if ctx.others else saved
        ctx.save_for_backward(*[owner_of.get(id(value), value) for value in tensors])
        # Saved parts whose padding is added again in backward.
        ctx.padded = [
            (position, placement)
            for index, placement in runner.padded.items()
            for position, value in enumerate(tensors)
            if value is locals_[index]
        ]
        ctx.parameters = parameter_edges(inputs, runner.partial)
        return outputs

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        runner: RegionRunner = ctx.runner
        if all(grad is None for grad in grads):
            return (None, None, *[None] * len(ctx.needs_input_grad[2:]))
        refuse_batched(grads)
        # Grad mode is on only with create_graph; entering no_grad takes longer than a small kernel.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), with_captured_casts():
            results = runner.run_backward(_saved(ctx), grads, ctx.tangent_metas)
            # Simulated ranks pass padded parts; only stored parameters lack the padding.
            for index, _, _ in ctx.parameters if runner.padded else ():
                if index in runner.padded:
                    results[index] = runner.without_padding(index, results[index])
        # Outside of no_grad, so that the grad mode of create_graph is visible.
        deliver(ctx.parameters, ctx.next_functions, results, grads)
        return (None, None, *forbid_double_backward(results, grads))


def unsharded(grad: Any) -> Tensor:
    """Return the full gradient from a computation that mixed an output with DTensors."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _distinct(outputs: Sequence[Any], seen: set[int]) -> tuple[Any, ...]:
    """Return outputs as distinct objects that are not in ``seen``, the ids of parameters'
    parts.

    Autograd writes one history into each object that a function returns.
    """
    result = []
    for out in outputs:
        result.append(out.view_as(out) if id(out) in seen else out)
        seen.add(id(out))
    return tuple(result)


def _changeable(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return outputs that are views only if they are views of inputs.

    Autograd refuses in-place changes (``loss /= 2``) of a function's results that are views, here
    of tensors that the region itself made. It must know views of inputs, or it would miss such a
    change.
    """
    if not any(isinstance(out, Tensor) and out._is_view() for out in outputs):
        return tuple(outputs)
    bases = {id(x if x._base is None else x._base) for x in inputs if isinstance(x, Tensor)}
    return tuple(
        # Shares the version counter, so that changes of saved tensors are detected.
        out.detach()
        if isinstance(out, Tensor) and out._is_view() and id(out._base) not in bases
        else out
        for out in outputs
    )


def _saved(ctx: Any) -> list[Any]:
    # Reading saved_tensors raises if a parameter was changed since.
    values = [x._local_tensor if isinstance(x, DTensor) else x for x in ctx.saved_tensors]
    for position, placement in ctx.padded:
        values[position] = padded_part(values[position], placement, ctx.runner.tp.world_size)
    for position, other in ctx.others:
        values.insert(position, other)
    return values


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
    """With ``create_graph``, return results whose own backward raises an error, instead of
    constants."""
    if not torch.is_grad_enabled():
        return list(results)
    sources = [grad for grad in grads if grad is not None and grad.requires_grad]
    return [
        result if result is None else _NoDoubleBackward.apply(result.requires_grad_(), *sources)
        for result in results
    ]
