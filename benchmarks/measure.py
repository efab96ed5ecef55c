"""What the benchmarks and the demo measure: kept bytes, collectives, alternated step times."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "all_gather_into_tensor": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "allreduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}

# A thread of gloo's holds a collective's tensors until a moment after the wait for it returned.
GLOO_LETS_GO_S = 0.2


class Recorder(TorchDispatchMode):
    """Inside, counts collectives and remembers every storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.wire_bytes: Counter[str] = Counter()
        self._made: list[tuple[StorageWeakRef, int, int]] = []
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs its local operators through here again
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in {"_c10d_functional", "c10d"} and name in COLLECTIVES:
            kind = COLLECTIVES[name]
            self.collectives[kind] += 1
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.wire_bytes[kind] += max(tensor.nbytes for tensor in tensors)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._remember(leaf)
        return result

    def alive_bytes(self, *, excluding: Iterable[Tensor]) -> int:
        """Bytes of the remembered storages that still exist, once each, without ``excluding``."""
        if self.collectives:
            time.sleep(GLOO_LETS_GO_S)
        return self._bytes(self._now(), self._numbers(excluding))

    def _remember(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type == "meta":
            return  # fake, or a wrapper of a tensor that was seen already
        storage = tensor.untyped_storage()
        known = self._alive.get(storage.data_ptr())
        if known is None or self._made[known][0].expired():
            self._alive[storage.data_ptr()] = len(self._made)
            self._made.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))

    def _now(self) -> list[int]:
        """Numbers of the storages that exist."""
        self._alive = {
            pointer: number
            for pointer, number in self._alive.items()
            if not self._made[number][0].expired()
        }
        return list(self._alive.values())

    def _numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Those of the storages of ``tensors``, which exist."""
        pointers = {_local(tensor).untyped_storage().data_ptr() for tensor in tensors}
        return {number for number in self._now() if self._made[number][1] in pointers}

    def _bytes(self, numbers: Iterable[int], left_out: set[int]) -> int:
        return sum(self._made[number][2] for number in numbers if number not in left_out)


class PeakRecorder(Recorder):
    """Also remembers after every operator which of the storages exist."""

    def __init__(self) -> None:
        super().__init__()
        self._moments: list[list[int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._moments.append(self._now())
        return result

    def peak_bytes(self, *, excluding: Iterable[Tensor]) -> int:
        """The most that existed at once, without the storages of ``excluding``, which exist."""
        left_out = self._numbers(excluding)
        return max(self._bytes(moment, left_out) for moment in self._moments)


@dataclass(frozen=True)
class StepReport:
    """What one training step did.

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
    """Milliseconds of each step in each round; every round runs each step once, in turn.

    Compare what was measured in the same round: drift of the machine then cancels. ``before`` runs
    before each step, outside the measured time; ``clock`` returns seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(warmup + rounds):
        for name, step in steps.items():
            before()
            with Stopwatch(clock) as watch:
                step()
            if index >= warmup:
                times[name].append(watch.ms)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of ``name``'s time in units of ``base``'s."""
    pairs = zip(times[name], times[base], strict=True)
    return statistics.median(mine / other for mine, other in pairs)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
