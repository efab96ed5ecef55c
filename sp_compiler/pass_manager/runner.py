"""Run passes one after another, and store the result, report and graphs of each."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch._dynamo import config as dynamo_config
from torch.fx import Graph
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.log import LOG
from sp_compiler.base.pass_report import PassReport, reporting
from sp_compiler.ir.program import Program
from sp_compiler.ir.snapshot import Snapshot, Stages, program_calls, region_of
from sp_compiler.pass_manager.stages import graphs_of, snapshot_after
from sp_compiler.trace.tracer_patches import without_hooks_of_all_modules

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Record:
    """One run of a pass.

    Attributes:
        result: its return value.
        report: its report.
        stage: the graphs after it.
    """

    result: Any
    report: PassReport
    stage: Snapshot


class PassRunner:
    """Runs passes and stores their results, reports and graphs.

    A pass is a function of the graphs that it rewrites and of its options, which returns the
    result, or nothing if it works in place. The runner knows no pass by name.

    Args:
        observer: called after each pass with its name and result.
        keep_graphs: whether to store graphs for :meth:`stages`.
    """

    def __init__(
        self, observer: Callable[[str, Any], None] | None = None, keep_graphs: bool = True
    ) -> None:
        self._observer = observer
        self._keep_graphs = keep_graphs
        self._shared: dict[tuple[str, str, str], _Record] = {}
        self._own: list[_Record] = []

    def once(
        self,
        name: str,
        function: Callable[..., Result],
        *args: Any,
        region: str = "",
        **options: Any,
    ) -> Result:
        """Run a pass whose result all memory settings share, or return its earlier result.

        Args:
            name: name of the pass.
            function: the pass, or a part of it.
            args: its arguments; the graphs that it rewrites come first.
            region: the only region of this run.
            options: keyword arguments.
        """
        # With the function, because a pass may have several: tags are chosen once, and written per
        # setting.
        key = (name, function.__name__, region)
        if key not in self._shared:
            self._shared[key] = self._run(name, function, args, options, region)
        result: Result = self._shared[key].result
        return result

    def __call__(
        self,
        name: str,
        function: Callable[..., Result],
        *args: Any,
        region: str = "",
        **options: Any,
    ) -> Result:
        """Run a pass whose result depends on the memory setting; see :meth:`once`."""
        record = self._run(name, function, args, options, region)
        self._own.append(record)
        result: Result = record.result
        return result

    @classmethod
    def after(cls, name: str, result: Any) -> PassRunner:
        """Record that the pass ``name`` was run elsewhere, with this result."""
        runner = cls()
        record = _Record(result, PassReport(name), snapshot_after(name, result))
        runner._shared[name, "", ""] = record
        return runner

    def forget_from(self, name: str) -> None:
        """Drop the pass ``name`` and all later ones."""
        # Passes are stored in the order of their first runs.
        names = [key[0] for key in self._shared]
        first = names.index(name) if name in names else len(names)
        self._shared = dict(list(self._shared.items())[:first])
        self.forget_setting()

    def forget_setting(self) -> None:
        """Drop results that depend on the memory setting."""
        self._own.clear()

    @property
    def reports(self) -> list[PassReport]:
        """Return one report per pass, summed over its runs, in the order of first runs."""
        totals: dict[str, PassReport] = {}
        for record in (*self._shared.values(), *self._own):
            report = record.report
            totals.setdefault(report.name, PassReport(report.name)).add(report)
        return list(totals.values())

    def stages(self, sharded: Program, final: Program) -> Stages:
        """Return the graphs after each pass, in the same order; passes without graphs are omitted.

        Args:
            sharded: the program of the passes that all memory settings share.
            final: the same with the final names of regions, see :meth:`Snapshot.renamed`.
        """
        names = [name for _, name in program_calls(final)]
        shared = _completed(_merged(self._shared.values(), sharded))
        renamed = {name: stage.renamed(names) for name, stage in shared.items()}
        return Stages(renamed | _merged(self._own, final))

    def _run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        region: str,
    ) -> _Record:
        report = PassReport(name)
        # Counted before it runs: a pass that works in place leaves nothing to compare with.
        num_nodes = _num_nodes(args[0], region)
        start = time.perf_counter()
        try:
            with reporting(report):
                result = function(*args, **options)
        except PlacementError as error:
            # Deeper code does not know the region: a check is given a graph.
            error.region = error.region or region
            raise
        # Wall time, because a user waits for it; the solver may use threads.
        report.seconds = time.perf_counter() - start
        of_region = f" of {region}" if region else ""
        LOG.info("%s%s: %.2f s, %d rewrites", name, of_region, report.seconds, report.rewrites)
        left = args[0] if result is None else result
        if graphs_of(left, region):  # a check leaves none
            report.node_delta = _num_nodes(left, region) - num_nodes
        if self._observer is not None:
            self._observer(name, left)
        # Copied now, because later passes rewrite graphs in place; every copy takes as long as a
        # small pass.
        stage = snapshot_after(name, left, region) if self._keep_graphs else Snapshot(name, {})
        return _Record(result, report, stage)


@contextlib.contextmanager
def running_passes(open_dims: bool) -> Iterator[None]:
    """Context in which passes run, without warnings about what they do on purpose, and hidden from
    modes of the caller."""
    # With symbolic sizes, looking up an operator's result takes longer than a run on fake tensors.
    lookup = dynamo_config.fake_tensor_cache_enabled and not open_dims
    cache_fakes = dynamo_config.patch(fake_tensor_cache_enabled=lookup)
    # torch internals: _disable_current_modes. Hides modes of the caller such as a FLOP counter.
    unseen = _disable_current_modes()
    with without_hooks_of_all_modules(), unseen, warnings.catch_warnings(), cache_fakes:
        # FX warns of SymInts as arguments; passes put them there on purpose.
        warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
        yield


def _num_nodes(subject: Any, region: str) -> int:
    return sum(len(graph.nodes) for graph in graphs_of(subject, region).values())


def _merged(records: Iterable[_Record], program: Program) -> dict[str, Snapshot]:
    """Merge by pass the results for single regions, with the calls of ``program``."""
    merged: dict[str, Snapshot] = {}
    calls = program_calls(program)
    # A pass that is given one region does not know the calls, so they are added if all its graphs
    # belong to them.
    regions = {name for _, name in calls}
    for record in records:
        stage = record.stage
        if not stage.graphs:
            continue
        if stage.name in merged:
            earlier = merged[stage.name]
            graphs, kept = {**earlier.graphs, **stage.graphs}, {**earlier.kept, **stage.kept}
            stage = replace(stage, graphs=graphs, kept=kept)
        if not stage.calls and regions.issuperset(map(region_of, stage.graphs)):
            stage = replace(stage, calls=calls)
        merged[stage.name] = stage
    return merged


def _completed(stages: Mapping[str, Snapshot]) -> dict[str, Snapshot]:
    """Add the graphs of regions that a pass left as they were."""
    result: dict[str, Snapshot] = {}
    earlier: dict[str, Graph] = {}
    for name, stage in stages.items():
        regions = set(map(region_of, stage.graphs))
        if regions < set(map(region_of, earlier)):
            rest = {
                each: graph for each, graph in earlier.items() if region_of(each) not in regions
            }
            stage = replace(stage, graphs={**rest, **stage.graphs})
        result[name], earlier = stage, stage.graphs
    return result
