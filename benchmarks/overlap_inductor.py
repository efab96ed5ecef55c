"""Communication that a backward exposes in our order and in that of Inductor's overlap pass.

    python -m benchmarks.overlap_inductor [--models GPT Llama Mixtral]

The block of :mod:`benchmarks.overlap` as compiled without overlap, with the same times of kernels
and collectives for both; our memory limit is the memory that Inductor's order takes.
``schedule_overlap_bucketing`` moves collectives and what it calls compute nodes (matmuls and
attention); :data:`ALLOWED` limits the growth of its peak. It does not recompute for another layer.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.overlap import (
    MODELS,
    RANKS,
    SHARES,
    block_of,
    compiled,
    exposed,
    with_communication,
)
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.memory import backward_peak_bytes
from sp_compiler.cost.node_cost import collectives_us, compute_us, node_collectives
from sp_compiler.cost.step_memory import Room
from sp_compiler.passes.overlap import overlap_collectives
from sp_compiler.passes.overlap.tasks import GraphTasks, graph_tasks
from sp_compiler.solve.block_schedule import is_valid, peak_bytes, simulate

# GiB by which its peak may grow, by its own count: nothing, and its default.
ALLOWED = (0.0, 1.0)
c10d = torch.ops._c10d_functional
# Operator and its arguments except the first.
FUNCTIONAL: dict[str, tuple[Any, ...]] = {
    "all_gather": (c10d.all_gather_into_tensor.default, RANKS, "0"),
    "reduce_scatter": (c10d.reduce_scatter_tensor.default, "sum", RANKS, "0"),
    "all_reduce": (c10d.all_reduce.default, "sum", "0"),
}


def inductor_order(graph: Graph, tasks: GraphTasks, device: Hardware, more_gb: float) -> list[int]:
    """Return the order in which Inductor's pass puts the tasks of ``graph``."""
    copy, made = Graph(), dict[Node, Node]()
    times_ms: dict[Node, float] = {}
    starts = {tasks.nodes[position]: position for position in tasks.block.wait_of}
    position_of: dict[Node, int] = {}
    kernels = {
        node: position
        for position, node in enumerate(tasks.nodes)
        if node not in starts and node.op == "call_function"
    }
    for node in graph.nodes:
        if node not in starts:
            made[node] = copy.node_copy(node, made.__getitem__)
            if node in kernels:
                position_of[made[node]] = kernels[node]
        else:
            (sent,) = node_collectives(node)
            operator, *rest = FUNCTIONAL[sent.kind]
            start = copy.call_function(operator, (made[node.all_input_nodes[0]], *rest))
            wait = copy.call_function(c10d.wait_tensor.default, (start,))
            start.meta, wait.meta = dict(node.meta), dict(node.meta)
            times_ms[start], made[node] = collectives_us([sent], RANKS, device) / 1000, wait
            position_of[start] = starts[node]
            position_of[wait] = tasks.block.wait_of[starts[node]]
        times_ms[made[node]] = compute_us(node, device) / 1000 if node not in starts else 0.0
    # Its own estimates, which ours replace, ask Triton for the device.
    with mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", return_value=0.0):
        ordered = overlap_scheduling.schedule_overlap_bucketing(
            GraphModule(torch.nn.Module(), copy),
            custom_runtime_estimation=lambda node, _: times_ms.get(node, 0.0),
            max_memory_increase_gb=more_gb,
            max_memory_increase_ratio=None,
        )
    return [position_of[node] for node in ordered.graph.nodes if node in position_of]


def print_rows(name: str) -> None:
    """Print a line for each policy, link and limit on memory."""
    parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    for recompute in ("selective", "full"):
        for share in SHARES:
            device = with_communication(share, [parts.forward, parts.backward])
            program = compiled(name, overlap=False, recompute=recompute, hardware=device)
            block = block_of(program)
            split = block.partitioned
            assert split.backward is not None
            indices = next(
                own
                for call, own in zip(
                    program.program.calls, program.program.own_parameters(RANKS), strict=True
                )
                if call.region is block.region
            )
            tasks = graph_tasks(split.backward, indices, device)
            link_us = sum(task.link_us for task in tasks.block.tasks)
            for more_gb in ALLOWED:
                order = inductor_order(split.backward, tasks, device, more_gb)
                assert is_valid(tasks.block, order)
                theirs = simulate(tasks.block, order).exposed_us / link_us
                limit = peak_bytes(tasks.block, order)
                ours = overlap_collectives(
                    split, indices, None, Room(backward_bytes=limit), device, in_a_row=True
                )
                graph = ours.middle_backward
                assert graph is not None
                print(
                    f"| {name} | {recompute} | {share:.0%} | {limit / 2**20:.0f} MiB "
                    f"| {theirs:.1%} | {exposed(graph, device):.1%} "
                    f"| {backward_peak_bytes(graph, indices) / 2**20:.0f} MiB |",
                    flush=True,
                )


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    print("| model | recompute | communication | its peak | Inductor | ours | our peak |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    for name in options.models:
        print_rows(name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
