"""Weight gradients that are computed later than the gradients of activations.

If a pipeline's schedule delays them, the backward of a region call computes only the gradients that
the previous stage waits for, and leaves the rest here as a function to run when the stage is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.runtime.parameter_gradients import partial_spec
from sp_compiler.runtime.reductions import DeferredGradients
from sp_compiler.runtime.region_call import RegionRunner


@dataclass(frozen=True)
class WeightTarget:
    """Destination of one gradient.

    Attributes:
        index: index of the region's input.
        name: stored name of the parameter.
        parameter: stored.
        is_partial: whether the gradient is a partial sum, as for a replicated parameter.
    """

    index: int
    name: str
    parameter: Tensor
    is_partial: bool


class WeightGradients:
    """Functions that compute weight gradients, in the order in which backward added them.

    Args:
        deferred: holds partial sums, which are reduced at the end of a step; ``None`` to add them
            to their parameters as such.
    """

    def __init__(self, deferred: DeferredGradients | None) -> None:
        self._deferred = deferred
        self._waiting: list[Callable[[], None]] = []

    def put(
        self, compute: Callable[[], Sequence[Tensor | None]], targets: Sequence[WeightTarget]
    ) -> None:
        """Add ``compute``, which returns one gradient per input of a region, to run later."""

        def run() -> None:
            with torch.no_grad():
                grads = compute()
            # Gradients of fused linears are parts of one storage, and what is in ``grad`` is
            # changed in place.
            owners = Counter(_storage(grad) for grad in grads if grad is not None)
            for target in targets:
                grad = grads[target.index]
                if grad is not None and target.parameter.requires_grad:
                    self._add(target, grad.clone() if owners[_storage(grad)] > 1 else grad)

        self._waiting.append(run)

    def take(self) -> Callable[[], None]:
        """Return a function that computes all weight gradients added since the last call."""
        waiting, self._waiting = self._waiting, []

        def run() -> None:
            while waiting:
                waiting.pop(0)()  # what it holds is free as soon as it has run

        return run

    def _add(self, target: WeightTarget, grad: Tensor) -> None:
        if target.is_partial and self._deferred is not None:
            self._deferred.add(target.name, grad)
        else:
            accumulate(target.parameter, grad, is_partial=target.is_partial)


@dataclass(frozen=True)
class DelayedRunner(RegionRunner):
    """Runs one call of a region with delayed weight gradients."""

    weights: WeightGradients | None = None
    targets: tuple[WeightTarget, ...] = ()

    def run_backward(
        self, saved: Sequence[Any], grads: Sequence[Tensor | None], metas: Sequence[Any]
    ) -> list[Tensor | None]:
        """As of the base class, ``None`` for parameters."""
        assert self.weights is not None
        loss, code = self.loss_backward, self.code
        tangents = self.tangents(grads, metas) if loss is None else [grads[loss.output]]
        # As in the base class: neither views nor versions.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            results, rest = code.backward_inputs(self.tp, saved, *tangents)  # type: ignore[attr-defined]

        unreached = self.unreached(grads)

        def compute() -> list[Tensor | None]:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                gradients = list(code.backward_weights(self.tp, rest))  # type: ignore[attr-defined]
            for index in self.padded:
                gradients[index] = self.without_padding(index, gradients[index])
            for index in unreached:
                gradients[index] = None
            return gradients

        self.weights.put(compute, self.targets)
        return [None if index in unreached else grad for index, grad in enumerate(results)]


def accumulate(parameter: Tensor, local: Tensor, *, is_partial: bool = False) -> None:
    """Add ``local``, this rank's part of a gradient, to ``parameter.grad``, hooks included.

    It may be a partial sum over "tp".
    """
    grad = local.contiguous()
    if isinstance(parameter, DTensor):
        spec = partial_spec(parameter._spec) if is_partial else parameter._spec
        grad = DTensor(grad, spec, requires_grad=False)
    torch.autograd.backward([parameter], [grad])


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
