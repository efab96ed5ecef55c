"""Forward and backward of one kind of call, each recorded in a CUDA graph."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ops.async_products import workspaces
from sp_compiler.ops.gpu.id_checks import IdBounds
from sp_compiler.runtime.cuda_graphs import device_graph
from sp_compiler.runtime.executor import Execution, Executor
from sp_compiler.runtime.parameter_gradients import (
    CompiledFunction,
    deliver,
    local_tensor,
    opaque,
    parameter_edges,
)
from sp_compiler.runtime.region_call import forbid_double_backward, unsharded


class ReplayedForward:
    """One replay of a forward, alive as long as its backward may still run.

    Attributes:
        is_done: whether its backward has run.
    """

    def __init__(self) -> None:
        self.is_done = False


class RecordedStep:
    """Forward and backward of one kind of call, recorded.

    A graph reads and writes fixed memory. Parameters and buffers are read where they are; inputs
    and the seed are copied in, outputs and gradients are copied out, because the next replay
    overwrites them.

    Args:
        executor: runs the program, which changes no buffers.
        parameters, buffers, leaves, seed: as for :meth:`Executor.run`; tensors among the leaves are
            on ``device``.
        starts: for each output that is a tensor, whether backward starts from it.
        device: where the kernels run.

    Attributes:
        untrained: the tensors that get no gradients and are read where they are.
    """

    def __init__(
        self,
        executor: Executor,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Sequence[Any],
        seed: Tensor | None,
        starts: Sequence[bool],
        device: torch.device,
    ) -> None:
        self._executor = executor
        self._read_buffers = dict(buffers)
        self._starts = list(starts)
        named = {name: parameters[name] for name in executor.compiled.param_placements}
        # Leaves of a separate autograd graph: its gradients are returned, and never put into a
        # parameter, where the next replay would overwrite them.
        own = {id(value): _leaf(value) for value in named.values()}
        self._own_parameters = {name: own[id(value)] for name, value in named.items()}
        # One name for each, because tied parameters share one gradient.
        names = {id(value): name for name, value in named.items() if value.requires_grad}
        self._trained = tuple(names.values())
        read = {
            ref.name
            for call in executor.compiled.program.calls
            for ref in call.args
            if ref.kind == "buffer"
        }
        self.untrained = [value for value in named.values() if not value.requires_grad]
        self.untrained += [value for name, value in buffers.items() if name in read]
        self._inputs = [_leaf(x.clone()) if isinstance(x, Tensor) else x for x in leaves]
        self._seed = None if seed is None else seed.clone()
        self._latest: weakref.ref[ReplayedForward] | None = None
        with executor.tp.id_checks.collected() as noted:
            self._record(device, noted)

    def _record(self, device: torch.device, noted: Sequence[IdBounds]) -> None:
        pool = device_graph.memory_pool()
        self._forward = device_graph.DeviceGraph(device, pool)
        self._backward = device_graph.DeviceGraph(device, pool)
        outputs = self._forward.record(self._run)
        # Not from the pool: kept alive because replays use them.
        self._workspaces = workspaces()
        self._id_bounds = list(noted)
        # Without autograd's graph, which holds the activations until the backward is recorded.
        self._outputs = [x.detach() if isinstance(x, Tensor) else x for x in outputs]
        tensors = tensors_of(outputs)
        self._requires_grad = [x.requires_grad for x in tensors]
        starts = list(itertools.compress(tensors, self._starts))
        del outputs, tensors
        self._tangents = [torch.empty_like(x) for x in starts]
        self._gradients = self._backward.record(lambda: self._backward_of(starts, self._tangents))

    @property
    def num_trained(self) -> int:
        """The number of parameters that get gradients."""
        return len(self._trained)

    @property
    def is_busy(self) -> bool:
        """Whether the backward of an earlier call, which may still run, needs the tensors."""
        latest = None if self._latest is None else self._latest()
        return latest is not None and not latest.is_done

    def __call__(
        self, parameters: Mapping[str, Tensor], leaves: Sequence[Any], seed: Tensor | None
    ) -> Execution:
        """Replay the forward; autograd records one function, whose backward is replayed too."""
        with torch.no_grad():
            for own, value in zip(self._inputs, leaves, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(value)
            if self._seed is not None and seed is not None:
                self._seed.copy_(seed)
        checks = self._executor.tp.id_checks
        checks.settle()
        call = ReplayedForward()
        self._latest = weakref.ref(call)
        given = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        trained = [parameters[name] for name in self._trained]
        tensors = iter(_Replay.apply(self, call, *trained, *given))
        for bounds in self._id_bounds:
            checks.note(bounds)
        checks.send()
        outputs = [next(tensors) if isinstance(x, Tensor) else x for x in self._outputs]
        return Execution(outputs, {})

    def replay_forward(self) -> list[Tensor]:
        """Return copies of the outputs that are tensors."""
        self._forward.replay()
        return [value.clone() for value in tensors_of(self._outputs)]

    def constant_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the ``outputs`` that require no gradient."""
        return [x for x, required in zip(outputs, self._requires_grad, strict=True) if not required]

    def replay_backward(
        self, call: ReplayedForward, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of the trained parameters, and of inputs that require one.

        Args:
            call: the forward that they belong to.
            grads: gradients of the outputs that are tensors; at least one is not ``None``.

        Raises:
            UnsupportedError: a second backward, after another forward; or gradients are deferred
                since the forward.
        """
        if self._latest is None or self._latest() is not call:
            raise UnsupportedError(
                "backward a second time through a call of a module with cuda_graphs=True, after "
                "another call, which has overwritten what this one kept; run all backwards of a "
                "call before the next one, or compile without cuda_graphs"
            )
        deferred = self._executor.deferred
        # On one rank nothing is deferred.
        if deferred.pending or (deferred.enabled and self._executor.tp.world_size > 1):
            raise UnsupportedError(
                "no_sync() between a call of a module with cuda_graphs=True and its backward, "
                "which was recorded with the reduction of its gradients; run both of them inside "
                "of no_sync(), or both outside of it with none in between"
            )
        starts = [grad is not None for grad in grads]
        tangents = [unsharded(grad) for grad in grads if grad is not None]
        is_recorded = starts == self._starts and not call.is_done
        call.is_done = True
        if not is_recorded:
            # A backward that was not recorded, or whose first run has overwritten what it read. All
            # that the forward reads is still there, so both run again.
            outputs = itertools.compress(tensors_of(self._run()), starts)
            return list(self._backward_of(list(outputs), tangents))
        for own, tangent in zip(self._tangents, tangents, strict=True):
            own.copy_(tangent)
        self._backward.replay()
        return [None if x is None else x.clone() for x in self._gradients]

    def _run(self) -> list[Any]:
        """Outputs of the forward, recorded for autograd."""
        with torch.enable_grad():
            return self._executor.run(
                self._own_parameters, self._read_buffers, self._inputs, self._seed
            ).outputs

    def _backward_of(
        self, outputs: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return gradients; those of parameters are this rank's parts."""
        wanted = [self._own_parameters[name] for name in self._trained]
        wanted += [x for x in tensors_of(self._inputs) if x.requires_grad]
        grads = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
        return [local_tensor(grad) for grad in grads]


class _Replay(CompiledFunction):
    """``apply(step, call, *tensors)``: outputs of a replay.

    ``tensors``: the trained parameters, and the inputs that require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, step: RecordedStep, call: ReplayedForward, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.call = step, call
        ctx.set_materialize_grads(False)
        outputs = step.replay_forward()
        ctx.mark_non_differentiable(*step.constant_outputs(outputs))
        # The backward reads them in place, so a change before it must raise.
        ctx.save_for_backward(*tensors[: step.num_trained], *step.untrained)
        ctx.parameters = parameter_edges(tensors)
        return tuple(outputs)

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None, None, *[None] * len(ctx.needs_input_grad[2:]))
        _ = ctx.saved_tensors  # raises for those that were changed
        with torch.no_grad():
            results = ctx.step.replay_backward(ctx.call, grads)
        deliver(ctx.parameters, ctx.next_functions, results, grads)
        return (None, None, *forbid_double_backward(results, grads))


def _leaf(value: Tensor) -> Tensor:
    """Return an autograd leaf that shares the memory of ``value``."""
    return value.detach().requires_grad_(value.requires_grad)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among ``values``."""
    return [value for value in values if isinstance(value, Tensor)]
