"""Timeline of a rank's device and its link in one step of a compiled program.

The order of kernels, starts and waits is that of the generated functions; the order of functions is
that of the step: calls forward, then backward in reverse, then the reduction of replicated
parameters' gradients. Copies to the host and back run concurrently
(:mod:`sp_compiler.cost.host_transfers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sp_compiler.cost.fused_kernels import fused_bytes
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.host_transfers import HostLink
from sp_compiler.cost.node_cost import Span, collectives_us, function_spans
from sp_compiler.cost.step_memory import Moment
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import step_backwards
from sp_compiler.ops.registry import Collective

_STREAMS = ("compute", "tp", "host")


@dataclass(frozen=True)
class FunctionRun:
    """One run of a generated function in a step.

    Attributes:
        block: name of its class; "" if it belongs to no block.
        path: path of the layer, "" for code outside of layers.
        phase: "forward" or "backward"; for a backward in two functions, "backward_inputs" and
            "backward_weights".
        begin_us: time since the start of the step.
        spans: spans of its kernels and collectives, relative to its own start; equal blocks share
            them.
    """

    block: str
    path: str
    phase: str
    begin_us: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class StepTimeline:
    """Estimated timeline of one step on one rank.

    Attributes:
        runs: runs of functions, in order.
        functions: spans of a function of a block, by the block's name and the function's.
        transfers: copies to the host and back, by the functions that the tensors belong to.
        host_wait_us: time during which the device only waits for these copies.
    """

    runs: tuple[FunctionRun, ...]
    functions: Mapping[tuple[str, str], tuple[Span, ...]] = field(default_factory=dict)
    transfers: tuple[FunctionRun, ...] = ()
    host_wait_us: float = 0.0

    @property
    def step_us(self) -> float:
        """Time from the first kernel to the last gradient."""
        return self.runs[-1].begin_us + duration_us(self.runs[-1].spans) if self.runs else 0.0

    @property
    def exposed_us(self) -> dict[str, float]:
        """By phase, the time during which the device only waits for the link."""
        exposed = {"forward": 0.0, "backward": 0.0}
        for run in self.runs:
            computed_us = sum(s.duration_us for s in run.spans if s.stream == "compute")
            exposed[run.phase.partition("_")[0]] += duration_us(run.spans) - computed_us
        return exposed

    @property
    def exposed_recompute_us(self) -> float:
        """Time of recomputation during which the link is idle."""
        return sum(map(_exposed_recompute_us, (run.spans for run in self.runs)))

    def spans(self) -> Iterator[tuple[FunctionRun, Span]]:
        """Every kernel, collective and copy, with times from the beginning of the step."""
        for run in (*self.runs, *self.transfers):
            for span in run.spans:
                begin_us, end_us = (run.begin_us + each for each in (span.begin_us, span.end_us))
                yield run, replace(span, begin_us=begin_us, end_us=end_us)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the sums; single spans are in a trace."""
        return {
            "step_us": self.step_us,
            "exposed_us": self.exposed_us,
            "exposed_recompute_us": self.exposed_recompute_us,
            "host_wait_us": self.host_wait_us,
        }

    def to_trace(self, path: str | Path) -> None:
        """Write a trace for ``chrome://tracing`` or Perfetto, one row per stream."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(_STREAMS)
            if name != "host" or self.transfers
        ]
        for run, span in self.spans():
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": category_of(span),
                    "ts": span.begin_us,
                    "dur": span.duration_us,
                    "pid": 0,
                    "tid": _STREAMS.index(span.stream),
                    "args": {"operator": span.operator, "phase": run.phase, "block": run.block,
                             "layer": run.path},
                }
            )  # fmt: skip
        trace = {"traceEvents": events, "displayTimeUnit": "ns"}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")


def step_timeline(
    compiled: CompiledProgram,
    order: Sequence[Moment],
    reduction: Sequence[Collective],
    hardware: Hardware,
    *,
    fused: bool,
) -> StepTimeline:
    """Return the timeline of one step of ``compiled``.

    Args:
        order: functions in execution order, see :func:`sp_compiler.cost.step_memory.step_memory`.
        reduction: collectives that reduce replicated parameters' gradients, at the end.
        fused: whether neighbouring elementwise operators are fused.
    """
    spans = _spans_of_functions(compiled, hardware, fused=fused)
    partitioned = {name: region.partitioned for name, region in compiled.regions.items()}
    backwards = step_backwards(compiled.program, partitioned)
    runs, now_us, waited_us = [], 0.0, 0.0
    link = HostLink(compiled, hardware)
    for moment in order:
        call = compiled.program.calls[moment.call]
        functions: tuple[str, ...] = ("forward",)
        ready_us = now_us
        if moment.phase == "backward":
            functions = backwards[moment.call]
            ready_us = max(now_us, link.fetched_us(moment.call, now_us))
        waited_us += ready_us - now_us
        now_us = ready_us
        for function in functions:
            own = spans[call.region.name, function]
            runs.append(FunctionRun(call.region.name, call.path, moment.phase, now_us, own))
            now_us += duration_us(own)
        end_us = now_us
        if moment.phase == "forward":
            now_us = max(end_us, link.left_us(moment.call, end_us))
            waited_us += now_us - end_us
    # After the last backward, where nothing is left to hide it.
    reduce_us = collectives_us(list(reduction), compiled.world_size, hardware)
    if reduce_us:
        span = Span("reduce_gradients", "all_reduce", "tp", 0.0, reduce_us)
        runs.append(FunctionRun("", "", "backward", now_us, (span,)))
    transfers = tuple(
        FunctionRun(call.region.name, call.path, phase, begin_us, copies)
        for index, phase, begin_us, copies in link.transfers
        for call in (compiled.program.calls[index],)
    )
    return StepTimeline(tuple(runs), spans, transfers, waited_us)


def _spans_of_functions(
    compiled: CompiledProgram, hardware: Hardware, *, fused: bool
) -> Mapping[tuple[str, str], tuple[Span, ...]]:
    spans = {}
    for name, region in compiled.regions.items():
        graphs = region.partitioned.functions
        # Under "backward" for callers that ask for a layer's backward: that of an ordinary step.
        if region.partitioned.step_backward is not None:
            graphs["backward"] = region.partitioned.step_backward
        for function, graph in graphs.items():
            # Per function, because kernels are fused only within one.
            traffic = fused_bytes(graph) if fused else None
            spans[name, function] = tuple(
                function_spans(graph, compiled.world_size, hardware, traffic)
            )
    return spans


def category_of(span: Span) -> str:
    """Return "communication", "offload", "recompute" or "compute"."""
    if span.stream != "compute":
        return "communication" if span.stream == "tp" else "offload"
    return "recompute" if span.recomputed else "compute"


def duration_us(spans: Sequence[Span]) -> float:
    """Return the end of the last of a function's ``spans``."""
    return max((span.end_us for span in spans), default=0.0)


def _exposed_recompute_us(spans: Sequence[Span]) -> float:
    # Collectives follow each other on one link, so no time is counted twice.
    on_link = [span for span in spans if span.stream == "tp"]
    return sum(
        span.duration_us
        - sum(
            max(0.0, min(span.end_us, other.end_us) - max(span.begin_us, other.begin_us))
            for other in on_link
        )
        for span in spans
        if span.recomputed and span.stream == "compute"
    )
