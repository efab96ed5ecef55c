"""Gradients of replicated parameters whose reduction was put off by ``no_sync``."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sp_compiler.errors import UnsupportedError


class DeferredGradients:
    """Gradients of replicated parameters whose reduction waits for a synchronised backward.

    Attributes:
        enabled: ``True`` while reductions are put off.
        pending: parameter name to the sum of this rank's unreduced gradients.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.pending: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        self.pending[name] = self.pending[name] + grad if name in self.pending else grad

    def take(self, name: str, grad: Tensor | None) -> Tensor | None:
        """``grad`` with what was put off for ``name``."""
        waiting = self.pending.pop(name, None)
        if waiting is None or grad is None:
            return waiting if grad is None else grad
        return grad + waiting


_WATCHED: weakref.WeakKeyDictionary[DeferredGradients, weakref.ref[nn.Module]] = (
    weakref.WeakKeyDictionary()
)


def watch_optimizer_steps(deferred: DeferredGradients, module: nn.Module) -> None:
    """Let optimizer steps on ``module`` raise while gradients are pending: they would be lost."""
    if not _WATCHED:
        register_optimizer_step_pre_hook(_refuse_pending)
    _WATCHED[deferred] = weakref.ref(module)


def _refuse_pending(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for deferred, reference in list(_WATCHED.items()):
        module = reference()
        if module is None or not deferred.pending:
            continue
        ids = {id(parameter) for parameter in module.parameters()}
        if any(
            id(p) in ids for param_group in optimizer.param_groups for p in param_group["params"]
        ):
            raise UnsupportedError(
                "optimizer.step() while gradients of replicated parameters are put off by "
                "no_sync(): run the last microbatch's backward outside of no_sync(), so that they "
                "are reduced"
            )
