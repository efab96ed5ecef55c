"""Which calls of a module replay a recorded step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.warn import warn
from sp_compiler.runtime.cuda_graphs import device_graph
from sp_compiler.runtime.cuda_graphs.recorded_step import RecordedStep, tensors_of
from sp_compiler.runtime.executor import Execution, Executor
from sp_compiler.runtime.keys.call_key import CallKey
from sp_compiler.runtime.parameter_gradients import CompiledFunction, local_tensor, opaque
from sp_compiler.runtime.rank_checks import RankAgreement
from sp_compiler.runtime.reductions import DeferredGradients

# Steps that run unrecorded before one is recorded: they load kernels, let libraries allocate their
# workspaces and connect the ranks, which a graph cannot record.
_WARM_UP = 2
# Each holds its own memory for a step.
_MAX_STEPS = 8
# After this many moves, steps are no longer recorded: they would not stay valid for long.
_MAX_MOVES = 8


@dataclass
class _Kind:
    """Calls that one recorded step serves.

    Attributes:
        executor: executor of their program.
        num_backwards: how many of them have run their backward.
        starts: from which of the outputs that are tensors the latest backward started.
        step: the recorded step.
        fails: whether it could not be recorded.
    """

    executor: Executor
    num_backwards: int = 0
    starts: Sequence[bool] = ()
    step: RecordedStep | None = None
    fails: bool = False


class _Noted(CompiledFunction):
    """``apply(kind, *outputs)``: the outputs of a call, whose backward is noted.

    A hook on an output would also see gradients that come from inside of the model.
    """

    @staticmethod
    def forward(ctx: Any, kind: _Kind, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        # No views, which may not be changed in place.
        results = tuple([x.detach() for x in outputs])
        constant = [y for x, y in zip(outputs, results, strict=True) if not x.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.kind.num_backwards += 1
        ctx.kind.starts = [grad is not None for grad in grads]
        return (None, *grads)


class ReplayedSteps:
    """Runs the calls of one module; those that train replay recorded graphs.

    A call that cannot be replayed runs unrecorded, with the same results and the same collectives.
    All ranks must replay the same calls, because NCCL does not let a collective in a graph meet one
    outside of a graph. Ranks that make the same calls decide in the same way, and if one of them
    cannot record a step, none does.

    Args:
        parameters, buffers: those of the module, by name.
        deferred: the gradients that it defers.
        agreement: agreement of the module's ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        deferred: DeferredGradients,
        agreement: RankAgreement,
    ) -> None:
        self._tensors = parameters, buffers
        self._deferred = deferred
        self._agreement = agreement
        self._kinds: OrderedDict[tuple[CallKey | None, int], _Kind] = OrderedDict()
        self._layout: Sequence[Any] = ()
        self._num_moves = 0
        self._said: set[str] = set()

    def run(
        self,
        executor: Executor,
        key: CallKey | None,
        leaves: Sequence[Any],
        seed: Tensor | None,
        device: torch.device,
        hooks: str,
    ) -> Execution:
        """Return :meth:`Executor.run` of the module's tensors and these.

        Args:
            executor, leaves, seed: those of the call.
            key: key of the call: all that its program does not read from tensors.
            device: device of the module.
            hooks: those that run between its blocks, in words.

        Raises:
            ArgumentError: there are no graphs on ``device``.
        """
        if not device_graph.can_record(device):
            raise ArgumentError(
                f"cuda_graphs=True: the module is on {device}; move it to a CUDA device, or "
                "compile it without cuda_graphs"
            )
        is_step = self._trains(leaves) and not device_graph.is_recording()
        obstacle = _obstacle(executor, leaves, device, hooks) if is_step else ""
        if obstacle:
            self._say(f"a step runs without CUDA graphs, because {obstacle}")
        if obstacle or not is_step:
            return executor.run(*self._tensors, leaves, seed)
        self._drop_moved()
        kind = self._kind(executor, key)
        step = self._step(kind, leaves, seed, device)
        if step is None:
            return self._warm_up(kind, leaves, seed)
        return step(self._tensors[0], leaves, seed)

    def _trains(self, leaves: Sequence[Any]) -> bool:
        """Return whether the backward of a call may run, and reduces its gradients at once."""
        return (
            torch.is_grad_enabled()
            and not self._deferred.enabled
            and not self._deferred.pending
            and any(x.requires_grad for x in chain(self._tensors[0].values(), tensors_of(leaves)))
        )

    def _drop_moved(self) -> None:
        """Drop all steps if parameters or buffers are no longer where they read them."""
        layout = _layout(*self._tensors)
        if layout == self._layout:
            return
        self._layout = layout
        recorded = [kind for kind in self._kinds.values() if kind.step is not None]
        for kind in recorded:
            kind.step = None
        self._num_moves += bool(recorded)
        if self._num_moves == _MAX_MOVES:
            self._say(
                "no more steps are recorded in CUDA graphs: parameters or buffers were moved or "
                f"replaced {_MAX_MOVES} times; change them in place"
            )

    def _kind(self, executor: Executor, key: CallKey | None) -> _Kind:
        # Two programs of one key differ in values that the forward has read.
        name = key, id(executor)
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = _Kind(executor)
            if len(self._kinds) > _MAX_STEPS:
                self._kinds.popitem(last=False)
                self._say(
                    f"more than {_MAX_STEPS} kinds of steps, which differ in sizes of inputs or in "
                    "mode: only the latest are recorded in CUDA graphs; pad inputs to fewer sizes"
                )
        self._kinds.move_to_end(name)
        return kind

    def _step(
        self, kind: _Kind, leaves: Sequence[Any], seed: Tensor | None, device: torch.device
    ) -> RecordedStep | None:
        """Return the recorded step for a call; ``None`` if it must run unrecorded."""
        step = kind.step
        if step is not None and step.is_busy:
            self._say(
                "a call runs without CUDA graphs, because the backward of the call before it may "
                "still run, and a replay would overwrite what it needs"
            )
            return None
        is_warm = kind.num_backwards >= _WARM_UP and self._num_moves < _MAX_MOVES
        if step is None and is_warm and not kind.fails:
            step = kind.step = self._recorded(kind, leaves, seed, device)
        return step

    def _recorded(
        self, kind: _Kind, leaves: Sequence[Any], seed: Tensor | None, device: torch.device
    ) -> RecordedStep | None:
        step, failure = None, ""
        try:
            step = RecordedStep(kind.executor, *self._tensors, leaves, seed, kind.starts, device)
        except RuntimeError as error:
            # From CUDA: an operator that waits for the device, no memory left. Nothing has run.
            failure = str(error) or type(error).__name__
        failures = self._agreement.exchanged("has recorded a step in CUDA graphs", failure)
        if any(failures):
            kind.fails = True
            why = next(filter(None, failures))
            self._say(f"a step runs without CUDA graphs; it could not be recorded: {why}")
            return None
        return step

    def _warm_up(self, kind: _Kind, leaves: Sequence[Any], seed: Tensor | None) -> Execution:
        """Run a call unrecorded, and note how its backward starts."""
        execution = kind.executor.run(*self._tensors, leaves, seed)
        if kind.step is not None or kind.fails:
            return execution
        noted = iter(_Noted.apply(kind, *tensors_of(execution.outputs)))
        outputs = [next(noted) if isinstance(x, Tensor) else x for x in execution.outputs]
        return replace(execution, outputs=outputs)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message)


def _obstacle(executor: Executor, leaves: Sequence[Any], device: torch.device, hooks: str) -> str:
    """Return why a graph would not do what the call does; empty if it would."""
    if executor.is_managed:
        return "fully_shard gathers parameters, and reduces gradients, in every step"
    if hooks:
        return f"the host runs hooks between the kernels: {hooks}"
    if changed := executor.compiled.program.mutated_buffers:
        return f"the model changes its buffers: {', '.join(changed)}"
    others = {x.device for x in tensors_of(leaves)} - {device}
    if others:
        return f"an input is on {others.pop()}, the module on {device}: move the input there"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are active, as in torch.utils.checkpoint"
    return ""


def _layout(*tensors: Mapping[str, Tensor]) -> Sequence[Any]:
    """Return address and strides of each of the tensors."""
    parts = [local_tensor(value) for each in tensors for value in each.values()]
    return [(part.data_ptr(), part.stride()) for part in parts]
