"""Gradients of replicated parameters, which are reduced together or deferred by ``no_sync``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ops.communicator import Communicator
from sp_compiler.runtime.parameter_gradients import (
    CompiledFunction,
    deliver,
    fills_grad,
    local_tensor,
    opaque,
    parameter_edges,
)
from sp_compiler.runtime.region_call import forbid_double_backward


class DeferredGradients:
    """Gradients of replicated parameters whose reduction is deferred to a later backward.

    Attributes:
        enabled: ``True`` while reductions are deferred.
        pending: parameter name to the sum of this rank's unreduced gradients.
        others_wait: whether other gradients are pending, for a reduction over data axes.
        drop_others: drops the other gradients of parameters with these ids.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.pending: dict[str, Tensor] = {}
        self.others_wait: Callable[[], bool] = lambda: False
        self.drop_others: Callable[[Collection[int]], None] = lambda ids: None

    @property
    def waits(self) -> bool:
        """Return whether gradients of some backward are missing in ``grad``."""
        return bool(self.pending) or self.others_wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredGradients:
        # A copied module has no gradients, and none pending.
        return DeferredGradients()

    @contextlib.contextmanager
    def enabled_for(self, module: nn.Module) -> Iterator[None]:
        """Context that defers the gradients of ``module``; :func:`refuse_pending` raises while some
        are pending."""
        # For all optimizers of the process at once: those of the module may not exist yet.
        if not _WATCHED:
            register_optimizer_step_pre_hook(_refuse_step)
        _WATCHED[self] = weakref.ref(module)
        before, self.enabled = self.enabled, True
        # Restored, not cleared: no_sync may be nested.
        try:
            yield
        finally:
            self.enabled = before

    def add(self, name: str, grad: Tensor) -> None:
        # Not in place: autograd may still pass the first gradient to others.
        self.pending[name] = self.pending[name] + grad if name in self.pending else grad

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Drop pending gradients of ``parameters``."""
        dropped = {id(parameter) for parameter in parameters}
        self.drop_others(dropped)
        module = _WATCHED[self]() if self.pending else None
        if module is None:
            return
        # By identity, since a tied parameter has several names; by nn.Module's own method, since a
        # model may override it to list some only.
        for name, parameter in nn.Module.named_parameters(module):
            if id(parameter) in dropped:
                self.pending.pop(name, None)

    def reduce_frozen(self, tp: Communicator, parameters: Mapping[str, Tensor]) -> None:
        """Reduce into ``grad`` the pending gradients of ``parameters`` that were frozen since.

        No backward will reach them; on a single device their gradients would be there already.
        """
        frozen = [name for name in self.pending if not parameters[name].requires_grad]
        totals = reduce_gradients(tp, [self.pending.pop(name) for name in frozen])
        for name, total in zip(frozen, totals, strict=True):
            parameter = parameters[name]
            assert isinstance(parameter, DTensor)
            assert total is not None
            grad = DTensor(total, parameter._spec, requires_grad=False)
            if parameter.grad is None:
                parameter.grad = grad
            else:
                # In place, as autograd does: the user may hold this very tensor.
                parameter.grad.add_(grad)

    def take(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Return ``grad`` plus the pending gradient of ``name``."""
        waiting = self.pending.pop(name, None)
        # A parameter that this backward does not reach still gets what earlier ones deferred.
        if waiting is None or grad is None:
            return waiting if grad is None else grad
        return grad + waiting


_WATCHED: weakref.WeakKeyDictionary[DeferredGradients, weakref.ref[nn.Module]] = (
    weakref.WeakKeyDictionary()
)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = (p for param_group in optimizer.param_groups for p in param_group["params"])
    refuse_pending("optimizer.step()", parameters)


def refuse_pending(caller: str, parameters: Iterable[Tensor]) -> None:
    """Raise :class:`UnsupportedError` if gradients of modules with ``parameters`` are pending.

    ``caller`` would read ``grad`` without them.
    """
    # Built at the first module that has some: this runs before every step of every optimizer.
    given: set[int] | None = None
    for deferred, reference in list(_WATCHED.items()):
        module = reference()
        if module is None or not deferred.waits:
            continue
        given = {id(parameter) for parameter in parameters} if given is None else given
        if any(id(parameter) in given for parameter in module.parameters()):
            raise UnsupportedError(
                f"{caller} while gradients are deferred by no_sync(): run the last microbatch's "
                "backward outside of no_sync(), so that they are reduced"
            )


class ReplicateParameters(CompiledFunction):
    """Invariant parameters as replicated values; backward reduces their gradients together.

    ``apply(tp, deferred, names, *parameters)``; one all-reduce per dtype. While ``deferred`` is
    enabled, it gets the gradients instead of the parameters.
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
        ctx.parameters = parameter_edges(parameters)
        # A parameter that this loss does not use must keep grad None, as in eager.
        ctx.set_materialize_grads(False)
        return tuple([local_tensor(parameter).detach() for parameter in parameters])

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        fills = [fills_grad(node) for node, _ in ctx.next_functions]
        with torch.no_grad():
            if ctx.deferred.enabled:
                _defer(ctx.deferred, ctx.names, grads, fills)
                return (None, None, None, *[None] * len(grads))
            # Gradients pending since no_sync belong in grad: only a backward that fills it takes
            # them. Gradients that are neither put there nor returned are not reduced.
            partial = [
                ctx.deferred.take(name, grad) if filled else grad if filled is None else None
                for name, grad, filled in zip(ctx.names, grads, fills, strict=True)
            ]
            results = reduce_gradients(ctx.tp, partial)
        # Copies, which share no memory with ``grads``.
        deliver(ctx.parameters, ctx.next_functions, results, ())
        return (None, None, None, *forbid_double_backward(results, grads))


def _defer(
    deferred: DeferredGradients,
    names: Sequence[str],
    grads: Sequence[Tensor | None],
    fills: Sequence[bool | None],
) -> None:
    """Add to ``deferred`` the gradients that fill ``grad``; see :func:`fills_grad`.

    Raises:
        UnsupportedError: a gradient is returned instead.
    """
    if None in fills:
        raise UnsupportedError(
            "torch.autograd.grad inside of no_sync() has no gradients of replicated parameters to "
            "return: they are summed over the ranks later; call it outside, or use loss.backward()"
        )
    for name, grad, filled in zip(names, grads, fills, strict=True):
        if grad is not None and filled:
            deferred.add(name, grad)


def reduce_gradients(tp: Communicator, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return sums over ranks of partial gradients, with one all-reduce per dtype."""
    # As in the backward of a region, no views or versions are tracked; this also bypasses the
    # autograd kernels of collectives, which are written in Python.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _reduced(tp, grads)


def _reduced(tp: Communicator, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    result: list[Tensor | None] = [None] * len(grads)
    by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for index, grad in enumerate(grads):
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).append((index, grad))
    for parts in by_dtype.values():
        # Norms and biases: dozens of small tensors, whose latencies would add up.
        flat = torch.cat([part if part.dim() == 1 else part.reshape(-1) for _, part in parts])
        total = tp.all_reduce(flat, "P", "I")
        del flat  # else three buckets would exist next to the gradients; plans count two
        # Copies: views would share one version counter and keep the whole bucket alive.
        pieces = torch.ops.aten.split_with_sizes_copy.default(
            total, [part.numel() for _, part in parts]
        )
        for (index, part), piece in zip(parts, pieces, strict=True):
            result[index] = piece if part.dim() == 1 else piece.view(part.shape)
    return result
