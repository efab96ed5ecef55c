"""The boards of this process, which errors outside of calls are reported to."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sp_compiler.runtime.failures.board import FailureBoard
from sp_compiler.runtime.parameter_gradients import CompiledFunction, refuse_as_inputs

_BOARDS: weakref.WeakKeyDictionary[dist.ProcessGroup, FailureBoard] = weakref.WeakKeyDictionary()


def failure_board(process_group: dist.ProcessGroup, kind: str, timeout: timedelta) -> FailureBoard:
    """Return the board of the group, the same for all modules that run in it.

    Raises:
        RankMismatchError: at the first call, not all ranks of the group arrive in time.
    """
    _watch_process()
    if process_group not in _BOARDS:
        _BOARDS[process_group] = FailureBoard(process_group, kind, timeout)
    board = _BOARDS[process_group]
    board.timeout = timeout
    return board


def board_of(process_group: dist.ProcessGroup) -> FailureBoard | None:
    """Return the board of the group, ``None`` if there is none."""
    return _BOARDS.get(process_group)


def report_everywhere(error: BaseException) -> None:
    """Report ``error``, which ends this process, to the ranks of all its groups."""
    for board in list(_BOARDS.values()):
        board.report(error)


@functools.cache
def _watch_process() -> None:
    """Report errors of this process outside of calls: in backward, in an optimizer, uncaught
    ones."""
    # Errors of hooks and of the user's own functions pass through the engine, not through our code.
    run_backward = torch.autograd._engine_run_backward
    torch.autograd._engine_run_backward = _reported(run_backward)

    def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        # The user's own plain parameters concern no group; a closure calls the module in the step.
        if args[1:] or kwargs or not any(isinstance(p, DTensor) for p in parameters):
            return
        for board in _BOARDS.values():
            board.unfinished_step = type(optimizer).__name__

    def end(*_: Any) -> None:
        for board in _BOARDS.values():
            board.unfinished_step = None

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report_everywhere(error)
        show(kind, error, trace)

    sys.excepthook = excepthook


def _reported(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run_backward`` that reports its errors to the boards if it runs a module's
    backward."""

    @functools.wraps(run_backward)
    def reported(
        tensors: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        refuse_as_inputs(inputs)
        try:
            return run_backward(tensors, grads, retain, create, inputs, *args, **kwargs)
        except BaseException as error:
            if _runs_compiled_code(tensors):
                for board in list(_BOARDS.values()):
                    if board.trains:
                        board.report(error)
            raise

    return reported


def _runs_compiled_code(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a compiled module computed ``tensors``: other ranks may wait for its
    collectives."""
    pending = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)]
    seen = set(pending)
    for node in pending:  # the list grows
        if issubclass(getattr(node, "_forward_cls", object), CompiledFunction):
            return True
        following = [after for after, _ in getattr(node, "next_functions", ()) if after not in seen]
        seen.update(following)
        pending += following
    return False
