"""A generated function that is compiled by Inductor."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_compiler.base.warn import warn
from sp_compiler.inductor.inlining import Inlining
from sp_compiler.inductor.lowering import Traced, compile_graph, trace
from sp_compiler.ops.communicator import Communicator


class TracingRank(Communicator):
    """The communicator for fake tensors: it has no group, and the rank is a value that is passed
    in."""

    def __init__(self, rank: Tensor, world_size: int) -> None:
        super().__init__(None, rank, world_size, _NoLink())
        # Shared by all functions that are traced with it, because they have equal calls.
        self.inlining = Inlining(world_size)


class _NoLink:
    """Collectives of fake tensors, which compute shapes only."""

    def all_gather(self, x: Tensor, world_size: int) -> Callable[[], Tensor]:
        return lambda: x.new_empty((x.shape[0] * world_size, *x.shape[1:]))

    def reduce_scatter(self, x: Tensor, world_size: int) -> Callable[[], Tensor]:
        return lambda: x.new_empty((x.shape[0] // world_size, *x.shape[1:]))

    def all_reduce(self, x: Tensor, op: str, in_place: bool = False) -> Callable[[], Tensor]:
        return lambda: torch.empty_like(x)


class Fused:
    """``function(tp, *arguments)``, compiled by Inductor, or run uncompiled if that fails.

    The first call, with a :class:`TracingRank` and fake tensors, traces it to a graph, whose sizes
    are open where those of the fake tensors are. :meth:`compile`, or the first call with real
    tensors, compiles it.

    Attributes:
        name: name of the function.
        reason: why it runs uncompiled; "" if it is compiled.
        is_rare: whether the usual training step does not call it.
        before_first_call: called before it first runs, to compile it on all ranks or on none.
        runs_as_written: whether all functions run as generated, even if they are compiled.
    """

    runs_as_written: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__qualname__
        self.reason = ""
        self.is_rare = False
        self.before_first_call: Callable[[], object] = self.compile
        self._function = function
        self._traced: Traced | None = None
        self._kernels: Callable[[list[Any]], Sequence[Any]] | None = None
        self._shares_memory: bool | None = None  # known from the first run on
        # By rank and device: making a tensor of the rank for every call would cost a kernel.
        self._rank_tensors: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, tp: Communicator, *arguments: Any) -> Any:
        if isinstance(tp, TracingRank):
            try:
                self._traced = trace(self._function, tp, arguments, tp.inlining)
                return self._traced.results
            except Exception as error:  # from torch: an operator that it cannot trace or decompose
                self.run_as_written(first_line(error))
                return self._function(tp, *arguments)
        if self.runs_as_written:
            return self._function(tp, *arguments)
        if self._traced is not None and self._kernels is None:
            self.before_first_call()
        if self._traced is None:
            return self._function(tp, *arguments)
        results = tp.on_each_rank(self._run, arguments)
        return results if self._traced.several else results[0]

    @property
    def is_traced(self) -> bool:
        """Return whether there is a graph to compile."""
        return self._traced is not None

    def run_as_written(self, reason: str) -> None:
        """Do not compile it; run the generated code."""
        self.reason = reason
        self._traced = self._kernels = None

    def compile(self) -> str:
        """Compile the graph if it is not compiled yet; return why it runs uncompiled, or ""."""
        if self._traced is not None and self._kernels is None:
            try:
                self._kernels = compile_graph(self._traced)
            except Exception as error:  # Inductor's, or the C++ compiler's
                self.run_as_written(first_line(error))
                warn(f"{self.name} runs uncompiled because Inductor failed: {self.reason}")
        return self.reason

    def _run(self, rank: int | Tensor, arguments: Sequence[Any]) -> Sequence[Any]:
        traced, kernels = self._traced, self._kernels
        assert traced is not None
        assert kernels is not None
        values = [
            value if arrange is None else arrange(value)
            for value, arrange in zip(
                [arguments[place] for place in traced.places], traced.arranges, strict=True
            )
        ]
        if traced.takes_rank:
            values.insert(0, self._rank_beside(values, rank, traced.fakes[0].device))
        if self._shares_memory is False:
            return kernels(values)
        results = kernels(list(values))  # which empties the list
        views = _as_views(results, values)
        pairs = zip(views, results, strict=True)
        self._shares_memory = any(view is not result for view, result in pairs)
        return views

    def _rank_beside(
        self, values: Sequence[Any], rank: int | Tensor, traced_on: torch.device
    ) -> Tensor:
        # A function may take only sizes, or only the rank: then use the device of the trace.
        devices = (value.device for value in values if isinstance(value, Tensor))
        device = next((each for each in devices if each.type == traced_on.type), traced_on)
        if isinstance(rank, Tensor):
            return rank.to(device)
        key = rank, device
        if key not in self._rank_tensors:
            self._rank_tensors[key] = torch.tensor(rank, device=device)
        return self._rank_tensors[key]


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Context in which all functions run as generated: for dtypes other than those of the trace,
    which kernels would misread."""
    # For all threads: backward on a GPU has its own.
    before, Fused.runs_as_written = Fused.runs_as_written, True
    try:
        yield
    finally:
        Fused.runs_as_written = before


def _as_views(results: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the results; those that share memory with an argument or an earlier result as views.

    Inductor returns them as separate tensors with separate version counters: autograd would not
    notice an in-place change of one where it has saved the other.
    """
    views: list[Any] = []
    owners: dict[int, Tensor] = {}
    for value in arguments:
        if isinstance(value, Tensor):
            owners.setdefault(value.untyped_storage()._cdata, value)
    for result in results:
        if not isinstance(result, Tensor):
            views.append(result)
            continue
        owner = owners.setdefault(result.untyped_storage()._cdata, result)
        # An operator that Inductor leaves to torch has returned a view already.
        if owner is result or result._is_view() or owner.dtype != result.dtype:
            views.append(result)
        else:
            place = result.shape, result.stride(), result.storage_offset()
            views.append(owner.as_strided(*place))
    return views


def inductor(function: Callable[..., Any]) -> Fused:
    """Decorator in generated code: compile ``function``, a part of a generated function."""
    return Fused(function)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none.

    Without addresses, so that it is the same on all ranks and in every run.
    """
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", line)
