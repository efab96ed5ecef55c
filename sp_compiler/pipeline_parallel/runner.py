"""Runs one compiled program as this rank's stages, on torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.module.state import ModuleState
from sp_compiler.pipeline_parallel.axes import PipelineAxis
from sp_compiler.pipeline_parallel.schedules import Schedule, forward_only, numbers
from sp_compiler.pipeline_parallel.stage_program import Stage
from sp_compiler.pipeline_parallel.watched_stage import Messages, WatchedStage
from sp_compiler.runtime.weight_gradients import WeightGradients

_WRAPPERS = ("failed to run forward", "Failed to run stage backward")
"""In the messages of errors that torch's stages raise from errors of their modules."""


@dataclass
class Feed:
    """Data of the microbatches of a step that stages need, by number.

    Attributes:
        leaves: flattened inputs.
        seeds: seeds of random numbers.
        weights: weights of the losses; they sum to 1 over all parts of the data.
        losses: weighted losses, in order of computation; on the last stage.
        outputs: what the model returns in addition to its loss, by microbatch; on the last stage.
    """

    leaves: Sequence[Sequence[Any]]
    seeds: Sequence[Tensor | None]
    weights: Sequence[Tensor | float]
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[int, list[Any]] = field(default_factory=dict)


class StageModule(nn.Module):
    """The module of torch's stage: ``forward(*received, microbatch) -> sent values, or the
    loss``."""

    def __init__(
        self, stage: Stage, state: ModuleState, index: int, weights: WeightGradients | None
    ) -> None:
        super().__init__()
        self._stage = stage
        self._state = state
        # The index of the stage, not of the rank: a rank may have the first stage and the last.
        self._is_first = index == 0
        self._executor = state.executor(stage.compiled, weights, gathered=True)
        self._rest = (
            None if stage.rest is None else state.executor(stage.rest, weights, gathered=True)
        )
        self.feed: Feed | None = None

    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        assert self.feed is not None
        state, number = self._state, int(microbatch)
        inputs = self.feed.leaves[number][: self._stage.num_inputs]
        # torch passes the first stage the number a second time, since it receives nothing.
        values = [*inputs, *(() if self._is_first else received)]
        keeps_most = self._rest is None or number in self._stage.saving
        executor = self._executor if keeps_most else self._rest
        assert executor is not None
        run = executor.run(state.parameters, state.buffers, values, self.feed.seeds[number])
        with torch.no_grad():
            for name, value in run.mutated_buffers.items():
                state.buffers[name].copy_(value)
        if self._stage.sent:
            # A value that later stages only return is sent without a gradient.
            likes = zip(run.outputs, self._stage.returned_like, strict=True)
            return tuple(value if like.requires_grad else value.detach() for value, like in likes)
        # Weighted here: torch gives all microbatches the same weight.
        weight = self.feed.weights[number]
        loss = run.outputs[0]
        if isinstance(weight, Tensor):
            weight = weight.to(loss)
            # The mean over no tokens is NaN, which must not enter the sum if its weight is 0.
            loss = torch.where(weight == 0, 0.0, loss * weight)
        else:
            loss = loss * weight
        # Summed after the step: reading a value now would wait for the device.
        self.feed.losses.append(loss.detach())
        self.feed.outputs[number] = [value.detach() for value in run.outputs[1:]]
        return loss


class StageRunner:
    """This rank's stages of one program, and torch's schedules of them.

    Args:
        stages: stages of all ranks, in order.
        state: parameters and buffers.
        axis: the ranks of the pipeline.
        schedule: schedule of the stages in training.
        microbatches: number of microbatches per step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        state: ModuleState,
        axis: PipelineAxis,
        schedule: Schedule,
        microbatches: int,
    ) -> None:
        _refuse_constants_on_old_torch(stages)
        self._microbatches = microbatches
        rank_of = {index: schedule.rank_of(index, axis.size) for index in range(len(stages))}
        own = [index for index, rank in rank_of.items() if rank == axis.rank]
        device = state.device()
        # FSDP2 reduces partial sums first, if there are data axes.
        deferred = state.deferred if state.group.data.mesh is None else None
        self._weights = WeightGradients(deferred) if schedule.delays_weights else None
        watched = axis.watched
        # On accelerators nothing waits on the host.
        self._messages = (
            Messages(watched.board, watched.timeout)
            if watched.board is not None and watched.collectives is not None
            else None
        )
        self._local = [StageModule(stages[index], state, index, self._weights) for index in own]

        def torch_stages() -> list[WatchedStage]:
            return [
                WatchedStage(
                    module,
                    index,
                    len(stages),
                    device,
                    input_args=stages[index].received_like or (numbers(1),),
                    output_args=stages[index].returned_like,
                    group=axis.group,
                    dw_builder=None if self._weights is None else self._weights.take,
                    messages=self._messages,
                )
                for module, index in zip(self._local, own, strict=True)
            ]

        # Two sets of stages: torch's stages receive into other buffers with backward than without.
        self.training = schedule.make(torch_stages(), microbatches, _loss)
        self.evaluation = forward_only(torch_stages(), rank_of.__getitem__, microbatches)
        self._has_first = 0 in own

    def run(self, feed: Feed, *, train: bool) -> None:
        """Run all microbatches; afterwards ``feed.losses`` has the losses, on the last stage."""
        for module in self._local:
            module.feed = feed
        index = numbers(self._microbatches)
        # The schedule splits its arguments, so it gets numbers: inputs that are not tensors, or
        # have no batch dim, could not be split.
        received = (index,) if self._has_first else ()
        try:
            if train:
                self.training.step(*received, microbatch=index, target=index, return_outputs=False)
            else:
                with torch.no_grad():
                    self.evaluation.step(*received, microbatch=index, return_outputs=False)
        except BaseException as error:
            if self._messages is not None:
                # A sent message may have no receiver, and there is no point that all ranks have
                # reached, from which the group could go on.
                self._messages.board.num_started = -1 - self._messages.board.rank
            # torch's own error is about shapes; its cause, raised by the model or for another rank,
            # says what is wrong.
            if error.__cause__ is not None and any(text in str(error) for text in _WRAPPERS):
                raise error.__cause__ from None
            raise
        finally:
            for module in self._local:
                module.feed = None


def _loss(loss: Tensor, microbatch: Tensor) -> Tensor:
    # The last stage returns it already weighted.
    return loss


def _refuse_constants_on_old_torch(stages: Sequence[Stage]) -> None:
    """Raise an error if torch's stages would need a gradient for every value that they receive."""
    if torch.__version__ >= TorchVersion("2.12"):
        return
    for number, stage in enumerate(stages):
        for ref, value in zip(stage.received, stage.received_like, strict=True):
            if not value.requires_grad:
                raise UnsupportedError(
                    f"stage {number} of the pipeline receives a value without a gradient (output "
                    f"{ref.output} of call {ref.index}), which torch.distributed.pipelining can "
                    f"send from torch 2.12 on; this is {torch.__version__}"
                )
