"""Weight gradients that are computed later than the gradients of activations.

If a pipeline's schedule delays them (the B/W split of zero-bubble schedules), the backward of a
region call computes only the gradients that the previous stage waits for, and leaves the rest here
as a function to run when the stage is idle. In a sequence of calls, each may also hand some of its
weight gradients over to the call before it, whose backward runs next and hides communication with
them. Autograd decides that order: where it is not as planned, each call computes its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.base.autocast import with_captured_casts
from sp_compiler.base.storage import sharing_elements
from sp_compiler.runtime.failures.origins import NAMING_ORIGINS
from sp_compiler.runtime.parameter_gradients import (
    CompiledFunction,
    deliver,
    is_only_added,
    local_tensor,
    opaque,
    parameter_edges,
    partial_spec,
)
from sp_compiler.runtime.reductions import DeferredGradients
from sp_compiler.runtime.region_call import Handed, RegionRunner, forbid_double_backward


@dataclass(frozen=True)
class WeightTarget:
    """Destination of one gradient.

    Attributes:
        index: index of the region's input.
        name: stored name of the parameter.
        parameter: the stored parameter.
        is_partial: whether the gradient is a partial sum, as for a replicated parameter.
    """

    index: int
    name: str
    parameter: Tensor
    is_partial: bool

    @property
    def key(self) -> tuple[int, bool]:
        """Equal for gradients that may be added up before they are accumulated."""
        return id(self.parameter), self.is_partial


_Compute = Callable[[], Sequence[Tensor | None]]


class WeightGradients:
    """Functions that compute weight gradients, in the order in which backward added them.

    Args:
        deferred: holds partial sums, which are reduced at the end of a step; ``None`` to accumulate
            them into their parameters unreduced.
    """

    def __init__(self, deferred: DeferredGradients | None) -> None:
        self._deferred = deferred
        self._waiting: list[tuple[_Compute, Sequence[WeightTarget]]] = []

    def put(self, compute: _Compute, targets: Sequence[WeightTarget]) -> None:
        """Add ``compute``, which returns one gradient per input of a region, to run later.

        Those of ``targets`` share no elements with other tensors.
        """
        self._waiting.append((compute, targets))

    def take(self) -> Callable[[], None]:
        """Return a function that computes all weight gradients added since the last call.

        If several calls add to one parameter, a tied one, the gradients are summed first: hooks of
        the parameter see the sum, as in a backward of autograd. Partial sums are added up
        separately, because they still have to be reduced.
        """
        waiting, self._waiting = self._waiting, []
        uses = Counter(target.key for _, targets in waiting for target in targets)
        sums: dict[tuple[int, bool], Tensor] = {}

        def run() -> None:
            while waiting:
                compute, targets = waiting.pop(0)  # its tensors are freed as soon as it has run
                with torch.no_grad():
                    grads = compute()
                for target in targets:
                    key, grad = target.key, grads[target.index]
                    uses[key] -= 1
                    if grad is not None and target.parameter.requires_grad:
                        sums[key] = sums[key] + grad if key in sums else grad
                    if not uses[key] and key in sums:
                        self._add(target, sums.pop(key))

        return run

    def _add(self, target: WeightTarget, grad: Tensor) -> None:
        if target.is_partial and self._deferred is not None:
            self._deferred.add(target.name, grad)
        else:
            accumulate(target.parameter, grad, is_partial=target.is_partial)


@dataclass(frozen=True)
class DelayedRunner(RegionRunner):
    """Runs one call of a region with delayed weight gradients."""

    weights: WeightGradients = field(kw_only=True)
    targets: tuple[WeightTarget, ...] = field(kw_only=True)

    def record(self, inputs: Sequence[Any], owners: Sequence[Tensor]) -> tuple[Any, ...]:
        """As in the base class, but without edges to parameters whose gradients come later: along
        these their hooks would run an extra time, without a gradient."""
        inputs = list(inputs)
        for target in self.targets:
            inputs[target.index] = local_tensor(inputs[target.index]).detach()
        if self.targets:
            # Backward must run even if no activation has a gradient, as in a first layer.
            anchor = inputs[self.targets[0].index].new_empty(0, requires_grad=True)
            inputs.append(anchor)
        return super().record(inputs, owners)

    def forward(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """As in the base class."""
        return super().forward(operands[:-1] if self.targets else operands)

    def run_backward(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """As in the base class, but ``None`` for parameters."""
        loss, code = self.loss_backward, self.code
        tangents = self.tangents(grads, metas) if loss is None else [grads[loss.output]]
        # As in the base class: no views or versions are tracked.
        with NAMING_ORIGINS, torch._C._AutoDispatchBelowADInplaceOrView():
            results, rest = code.backward_inputs(self.tp, saved, *tangents)  # type: ignore[attr-defined]

        unreached = self.unreached(grads)

        def compute() -> list[Tensor | None]:
            with NAMING_ORIGINS, torch._C._AutoDispatchBelowADInplaceOrView():
                gradients = list(code.backward_weights(self.tp, rest))  # type: ignore[attr-defined]
            for index in self.padded:
                gradients[index] = self.without_padding(index, gradients[index])
            for index in unreached:
                gradients[index] = None
            # Later gradients are added to a parameter's first one in place, maybe while another
            # stage still receives the gradient of an activation.
            given = [x for x in (*rest, *gradients) if isinstance(x, Tensor)]
            shared = set(map(id, sharing_elements(given)))
            return [x.clone() if id(x) in shared else x for x in gradients]

        self.weights.put(compute, self.targets)
        gradients = [None if index in unreached else grad for index, grad in enumerate(results)]
        return [*gradients, None] if self.targets else gradients  # None for the anchor


def can_work_for_others(managed: Collection[str]) -> bool:
    """Return whether a backward may do work for another call.

    Parameters that FSDP gathers for that call are not there yet, and hooks on saved tensors, such
    as those of ``torch.utils.checkpoint``, allow only one read.

    Args:
        managed: names of the parameters that FSDP gathers.
    """
    return not managed and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class LateGradients:
    """Gradients of one call that its backward hands over to the call before it.

    Attributes:
        behind: the late gradients of the call after it.
        handed: tensors to compute them from, put there by the call's own backward.
        computed: gradients, put there by the backward of the call before.
        unreached: indices of inputs that no gradient reached, put there by the call's own backward.
    """

    def __init__(self, runner: RegionRunner, indices: Sequence[int]) -> None:
        self.behind: LateGradients | None = None
        self.handed, self.computed, self.unreached = Handed(), Handed(), Handed()
        self.indices = indices
        self._runner = runner

    def take(self) -> list[Tensor | None]:
        """Return the gradients of the inputs ``indices``; compute them now if nothing else
        did."""
        runner, results = self._runner, self.computed.take()
        if results is None:
            code: Any = runner.code
            with NAMING_ORIGINS, torch._C._AutoDispatchBelowADInplaceOrView():
                made = code.backward_weights(runner.tp, self.handed.take())
            results = [made[index] for index in self.indices]
        unreached = self.unreached.take() or ()
        return [
            None if index in unreached else grad
            for index, grad in zip(self.indices, results, strict=True)
        ]

    def in_stored_form(self, position: int, grad: Tensor | None) -> Tensor | None:
        """Return the gradient of the input ``indices[position]`` without padding."""
        index, runner = self.indices[position], self._runner
        return runner.without_padding(index, grad) if index in runner.padded else grad


class LateFunction(CompiledFunction):
    """Autograd node of gradients that are computed late: ``apply(late, *parameters) -> token``.

    The call takes the token as one more input, so this node becomes ready when the call's backward
    has run. Autograd runs the youngest of the ready nodes first. Nodes between the two calls are
    younger than the call before, so a node that is older than that call runs after its backward.
    """

    @staticmethod
    def forward(ctx: Any, late: LateGradients, *parameters: Tensor) -> Tensor:
        # Weak: after a failed backward, autograd's queue keeps nodes that were ready. The call's
        # own node keeps ``late`` alive as long as the graph exists.
        ctx.late = weakref.ref(late)
        ctx.set_materialize_grads(False)
        ctx.parameters = parameter_edges(parameters)
        # On the parameters' device: autograd has a queue for each device.
        token: Tensor = local_tensor(parameters[0]).new_empty(0)
        return token

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        late: LateGradients = ctx.late()
        if grads[0] is None:
            return (None, *[None] * len(late.indices))
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), with_captured_casts():
            results = late.take()
            for index, _, _ in ctx.parameters:
                results[index] = late.in_stored_form(index, results[index])
        deliver(ctx.parameters, ctx.next_functions, results, grads)
        return (None, *forbid_double_backward(results, grads))


@dataclass(frozen=True)
class HandOverRunner(RegionRunner):
    """Runs one call of a region whose backward hands gradients over to the call before it.

    ``token``: see :class:`LateFunction`.
    """

    late: LateGradients = field(kw_only=True)
    token: Tensor = field(kw_only=True)

    def record(self, inputs: Sequence[Any], owners: Sequence[Tensor]) -> tuple[Any, ...]:
        """As in the base class."""
        return super().record([*inputs, self.token], owners)

    def forward(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """As in the base class."""
        *own, _ = operands
        return super().forward(own)

    def run_backward(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """As in the base class, followed by the gradient of the token, which has no
        elements."""
        return [*super().run_backward(saved, grads, metas), self.token.detach()]

    def compute_gradients(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """As in the base class, without the gradients that it hands over."""
        code: Any = self.code
        node: Any = self.token.grad_fn
        late, tangents = self.late, self.tangents(grads, metas)
        handed = None if late.behind is None else late.behind.handed.take()
        if handed is None:
            results, rest = code.backward_inputs(self.tp, saved, *tangents)
        else:
            results, rest = code.backward_behind(self.tp, saved, handed, *tangents)
        results = list(results)
        if handed is not None:
            assert late.behind is not None
            # They are at the indices of this call's own late gradients.
            late.behind.computed.put([results[index] for index in late.indices])
        for index in late.indices:
            results[index] = None
        if torch._C._will_engine_execute_node(node):
            late.handed.put(list(rest))
            late.unreached.put(self.unreached(grads))
        return results


def hand_over_runner(
    runner: RegionRunner, indices: Sequence[int], owners: Sequence[Tensor], before: Any
) -> HandOverRunner | None:
    """Return ``runner`` for one call that hands gradients over; ``None`` if there are none to hand
    over.

    Args:
        indices: inputs of the region whose gradients are handed over.
        owners: all parameters of the call.
        before: autograd node of the call before; ``None`` if that does not call the region.
    """
    by_index = dict(zip(runner.parameters, owners, strict=True))
    parameters = [by_index[index] for index in indices]
    if not any(parameter.requires_grad for parameter in parameters):
        return None
    late = LateGradients(runner, indices)
    token = LateFunction.apply(late, *parameters)
    if before is not None and isinstance(before.runner, HandOverRunner):
        number = _number_of(before)
        if number is not None:
            before.runner.late.behind = late
            # Just older than that call: even if hooks on one rank have made nodes between the two,
            # all ranks run the same functions.
            token.grad_fn._set_sequence_nr(number - 1)
    return HandOverRunner(**vars(runner), late=late, token=token)


def _number_of(node: Any) -> int | None:
    """Return the sequence number of an autograd node; ``None`` if torch 2.11 no longer has one: a
    hook has cut off the graph after it, and its backward will not run."""
    try:
        number: int = node._sequence_nr()
    except RuntimeError:
        return None
    return number


def accumulate(parameter: Tensor, local: Tensor, *, is_partial: bool = False) -> None:
    """Add ``local``, this rank's part of a gradient, to ``parameter.grad``, hooks included.

    It may be a partial sum over "tp". If it is the first, ``grad`` may be this very tensor.
    """
    grad = local.contiguous()
    if isinstance(parameter, DTensor):
        spec = partial_spec(parameter._spec) if is_partial else parameter._spec
        grad = DTensor(grad, spec, requires_grad=False)
    if parameter.grad is None and is_only_added(parameter, grad):
        parameter.grad = grad  # autograd would copy it, because it has another holder: this
    else:
        torch.autograd.backward([parameter], [grad])
