"""Peak of activations against the memory budget, compared with torch's own partitioner.

    python -m benchmarks.budget_curve [--layers 6] [--write]

One process, one rank, dropout on. Writes ``budget_curve.json`` and, where matplotlib is installed,
``budget_curve.png``. Both peaks are counted on the graphs that run: tensors that live between or
inside their functions, without parameters, their gradients and inputs. torch's budget is its
``activation_memory_budget``, a fraction of what it keeps by default; ours is in bytes, shown as a
fraction between the minimum that fits and the budget that costs no time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node

from benchmarks.contenders import random_ids
from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.performance import RESULTS
from sp_compiler.base.errors import ArgumentError
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.cost.memory import function_peak_bytes
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.op_traits import base
from sp_compiler.options import CompileOptions
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.trace.export import capture


class LossOnly(nn.Module):
    """A model that returns nothing but its loss."""

    def __init__(self, model: PlainGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, labels=ids).loss


@dataclass(frozen=True)
class Point:
    """``fraction`` of the budget's range; ``budget_bytes`` is absent for torch."""

    fraction: float
    peak_bytes: int
    kept_bytes: int
    budget_bytes: int | None = None
    step_us: float | None = None


def ours(model: nn.Module, ids: Tensor, count: int) -> list[Point]:
    """Plans for ``count`` budgets."""
    options = CompileOptions(tp=1)
    program = to_program(capture(model, (ids,), {}), options)
    shared = Compilation(program, options)
    least, most = _least_bytes(shared), _planned(shared, 1 << 60).activation_peak_bytes
    points = []
    for step in range(count):
        budget = least + (most - least) * step // (count - 1)
        found = _planned(shared, budget)
        kept, peak = found.activation_bytes, found.activation_peak_bytes
        points.append(Point(step / (count - 1), peak, kept, budget, found.step_us))
    return points


def _planned(shared: Compilation, budget: int) -> Plan:
    options = CompileOptions(tp=1, recompute="auto", memory_budget=budget)
    return make_plan(shared.finish(options), options)


def _least_bytes(shared: Compilation) -> int:
    try:
        _planned(shared, 1)
    except ArgumentError as error:
        return int(str(error).partition("the minimum that fits is ")[2].split()[0])
    raise AssertionError("one byte cannot be enough")


def torchs(model: nn.Module, ids: Tensor, count: int) -> list[Point]:
    """torch's min-cut partitioner at ``count`` budgets."""
    points = []
    for step in range(count):
        fraction = step / (count - 1)
        torch._dynamo.reset()
        graphs: list[Graph] = []

        def keep(module: GraphModule, _: Sequence[Any], graphs: list[Graph] = graphs) -> Any:
            graphs.append(module.graph)
            return module.forward

        backend = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )
        with functorch_config.patch(activation_memory_budget=fraction):
            torch.compile(model, backend=backend)(ids).backward()
        forward, backward = graphs
        kept = [
            node for node in backward.find_nodes(op="placeholder") if _is_activation(node, forward)
        ]
        peak = max(function_peak_bytes(forward), boxed_peak_bytes(backward, kept))
        points.append(Point(fraction, peak, sum(tensor_bytes(n.meta["val"]) for n in kept)))
    return points


def _is_activation(node: Node, forward: Graph) -> bool:
    inputs = {other.name for other in forward.find_nodes(op="placeholder")}
    tangent = node.name.startswith("tangents")
    return not tangent and node.name not in inputs and isinstance(node.meta["val"], Tensor)


def boxed_peak_bytes(graph: Graph, kept: Sequence[Node]) -> int:
    """The peak of a backward that frees each of ``kept`` after its last use.

    Gradients that it returns are those of parameters and do not count.
    """
    returned = {base(node) for node in graph.output_node().all_input_nodes}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    last: dict[Node, int] = {}
    for position, node in enumerate(nodes):
        last.update((base(used), position) for used in (node, *node.all_input_nodes))
    sizes = {node: _bytes(node) for node in last if node.op != "placeholder" or node in kept}
    live = peak = sum(sizes[node] for node in kept if node in sizes)
    for position, node in enumerate(nodes):
        if base(node) is node and node not in returned:
            live += sizes[node]
            peak = max(peak, live)
        live -= sum(
            sizes[gone]
            for gone, end in last.items()
            if end == position and gone in sizes and gone not in returned
        )
    return peak


def _bytes(node: Node) -> int:
    return tensor_bytes(node.meta["val"]) if isinstance(node.meta.get("val"), Tensor) else 0


def rises(points: Sequence[Point]) -> list[float]:
    """Budgets below which the peak is higher than at some larger budget."""
    return [
        less.fraction
        for less, more in itertools.pairwise(points)
        if less.peak_bytes > more.peak_bytes
    ]


def draw(curves: dict[str, list[Point]], path: Path) -> bool:
    """Write the figure; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, points), marker in zip(curves.items(), ("o", "s"), strict=True):
        x, y = [p.fraction for p in points], [p.peak_bytes / 2**20 for p in points]
        axes.plot(x, y, marker=marker, markersize=4, label=name)
    axes.set(xlabel="memory budget, part of its range", ylabel="peak of activations, MiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def main() -> None:
    """Print both curves; keep them if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=1024,
        num_positions=options.sequence,
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=8,
    )
    model, ids = LossOnly(PlainGPT(config)), random_ids(config, 4, options.sequence)
    curves = {
        "sp_compiler, recompute=auto": ours(model, ids, options.budgets),
        "torch's partitioner": torchs(model, ids, options.budgets),
    }
    table = Table("budget", *curves)
    for row in zip(*curves.values(), strict=True):
        peaks = (f"{point.peak_bytes / 2**20:.1f} MiB" for point in row)
        table.add_row(f"{row[0].fraction:.2f}", *peaks)
    console = Console()
    console.print(table)
    for name, points in curves.items():
        console.print(f"{name}: a smaller budget has a larger peak at {rises(points) or 'none'}")
    if not options.write:
        return
    data = {name: [asdict(point) for point in points] for name, points in curves.items()}
    (RESULTS / "budget_curve.json").write_text(json.dumps(data, indent=2) + "\n")
    if not draw(curves, RESULTS / "budget_curve.png"):
        console.print("no figure: matplotlib is not installed (pip install matplotlib)")


if __name__ == "__main__":
    main()
