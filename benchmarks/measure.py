"""Measurements of the benchmarks and the demo: saved bytes, collectives, alternated step times."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sp_compiler.runtime.recorder import Recorder


class PeakRecorder(Recorder):
    """Also records after every operator which storages exist."""

    def __init__(self) -> None:
        super().__init__()
        self._moments: list[list[int]] = []

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__torch_dispatch__(*args, **kwargs)
        self._moments.append(self._now())
        return result

    def peak_bytes(self, *, excluding: Iterable[Tensor]) -> int:
        """The peak of live bytes, without the storages of ``excluding``, which exist."""
        left_out = self._numbers(excluding)
        return max(self._bytes(moment, left_out) for moment in self._moments)


@dataclass(frozen=True)
class StepReport:
    """Memory and communication of one training step.

    Args:
        kept_bytes: storages alive after forward, once each, without parameters, buffers, inputs
            and outputs.
        forward: number of collectives in forward, by kind.
        backward: number of collectives in backward, by kind.
        wire_bytes: bytes of the whole tensors that collectives handled in both, by kind.
    """

    kept_bytes: int
    forward: Mapping[str, int]
    backward: Mapping[str, int]
    wire_bytes: Mapping[str, int] = field(default_factory=dict)


def observe_step(
    model: nn.Module, inputs: Iterable[Tensor], forward: Callable[[], Any]
) -> StepReport:
    """Run ``forward`` and the backward of its loss once, and report.

    Args:
        model: whose parameters and buffers do not count as kept.
        inputs: the tensors that ``forward`` reads; they do not count either.
        forward: returns the loss, or an output with ``.loss``.
    """
    before, after = Recorder(), Recorder()
    with before:
        output = forward()
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    outside = [*model.parameters(), *model.buffers(), *inputs, *outputs]
    kept_bytes = before.alive_bytes(excluding=outside)
    with after:
        loss_of(output).backward()
    return StepReport(
        kept_bytes, before.collectives, after.collectives, before.wire_bytes + after.wire_bytes
    )


def loss_of(output: Any) -> Tensor:
    """The loss: the output itself, or its ``loss``."""
    return output if isinstance(output, Tensor) else output.loss


class Stopwatch:
    """Milliseconds of a ``with`` block, in ``ms`` after it.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def __enter__(self) -> Self:
        self.ms = 0.0
        self._start = self._clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ms = 1e3 * (self._clock() - self._start)


def alternate(
    steps: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    before: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of each step in each round; every round runs each step once.

    Compare times of the same round, so that drift of the machine cancels. The order differs between
    rounds, but not between ranks, because a step is slower after one that leaves cold caches.
    ``before`` runs before each step, outside the measured time; ``clock`` returns seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    shuffler = random.Random(0)
    for index in range(warmup + rounds):
        for name in shuffler.sample(list(steps), len(steps)):
            before()
            with Stopwatch(clock) as watch:
                steps[name]()
            if index >= warmup:
                times[name].append(watch.ms)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of ``name``'s time in units of ``base``'s."""
    pairs = zip(times[name], times[base], strict=True)
    return statistics.median(actual / other for actual, other in pairs)
