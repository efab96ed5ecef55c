"""Communication that backward exposes: blocks of three models, on links of three speeds.

    python -m benchmarks.overlap [--models GPT Llama Mixtral] [--recompute none selective full]
        [--half-batches | --steps]

Compiled on the meta device for 8 ranks; times are those of the profile "h100" with an interconnect
on which communication is 10, 20 and 40 % of forward and backward of a block that recomputes
nothing. The schedule's own clock measures the exposed part, for a layer in the middle of the model
if backwards work for other calls. ``--half-batches`` shows the communication that the whole step
exposes, with a batch of two and with its halves; ``--steps`` shows times of steps on the slowest of
the links, with both backends.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import Graph, Node
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.layers_bound import least_of_many_us
from benchmarks.models import GPTConfig, PlainGPT
from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.compiler import build
from sp_compiler.cost.hardware import Hardware, Link, hardware_of
from sp_compiler.cost.node_cost import collectives_us, compute_us, elapsed_us, node_collectives
from sp_compiler.cost.step_memory import StepMemory, step_memory
from sp_compiler.cost.step_timeline import FunctionRun, StepTimeline
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import PartitionedRegion
from sp_compiler.ir.fx import ancestors, descendants
from sp_compiler.options import CompileOptions
from sp_compiler.passes import fuse_attention
from sp_compiler.passes.overlap.tasks import graph_tasks
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.solve.block_schedule import Block, Task
from sp_compiler.solve.schedule_bound import least_us

RANKS, LAYERS, HIDDEN, LENGTH = 8, 4, 4096, 2048
SHARES = (0.1, 0.2, 0.4)
POLICIES = ("none", "selective", "full")
_DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
}


def _gpt() -> nn.Module:
    config = GPTConfig(
        vocab_size=51200,
        num_positions=LENGTH,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=32,
    )
    return PlainGPT(config)


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=128256, **_DECODER))


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": 8, "experts_implementation": "grouped_mm"}
    return MixtralForCausalLM(MixtralConfig(vocab_size=32000, **_DECODER, **experts))


MODELS = {"GPT": _gpt, "Llama": _llama, "Mixtral": _mixtral}


@dataclass(frozen=True)
class Row:
    """One block on one link.

    Attributes:
        share: of communication in forward and backward of a block that recomputes nothing.
        exposed: part of backward's communication that no work hides.
        least: lower bound for any order, any number of layers and any amount of memory.
        alone: the exposed part if backwards do no work for other calls.
        blocking_bytes: peak of the step without overlap.
        peak_bytes: peak of the step.
        recompute_us: kernels that backward runs again.
        hidden_us: part of that during which the link is busy.
        fitting_us: the most that could be: kernels that are no recomputation leave the link so much
            time alone.
        in_a_row: whether backwards recompute for the call before, or leave it gradients.
    """

    model: str
    recompute: str
    share: float
    exposed: float
    least: float
    alone: float
    blocking_bytes: int
    peak_bytes: int
    recompute_us: float
    hidden_us: float
    fitting_us: float
    in_a_row: bool


def compiled(name: str, batch: int = 1, **options: Any) -> PlannedProgram:
    """A model of four layers in bfloat16, without memory for its parameters."""
    with torch.device("meta"):
        model = MODELS[name]().to(torch.bfloat16)
        ids = torch.zeros(batch, LENGTH, dtype=torch.int64)
    args, kwargs = ((ids,), {}) if name == "GPT" else ((), {"input_ids": ids})
    return build(model, args, {**kwargs, "labels": ids}, CompileOptions(tp=RANKS, **options))


def block_of(program: CompiledProgram) -> PartitionedRegion:
    """The region that most calls share."""
    return max(program.regions.values(), key=lambda each: len(program.program.paths(each.region)))


def with_communication(share: float, graphs: Sequence[Graph]) -> Hardware:
    """An H100 with a link on which communication is ``share`` of the time of ``graphs``."""
    device = hardware_of("h100")
    work_us = sum(compute_us(node, device) for graph in graphs for node in graph.nodes)
    # Only the bytes: at an unlimited rate only the latency would remain.
    free = replace(device, interconnect=_links(device, 1.0))
    bytes_us = sum(_communication_us(graph, free) for graph in graphs)
    return replace(device, interconnect=_links(device, bytes_us * (1 - share) / (share * work_us)))


def _links(device: Hardware, gb_per_s: float) -> Mapping[str, Link]:
    return {kind: Link(0.0, gb_per_s) for kind in device.interconnect}


def _communication_us(graph: Graph, device: Hardware) -> float:
    return sum(collectives_us(node_collectives(node), RANKS, device) for node in graph.nodes)


def rows(name: str, policies: Sequence[str]) -> Iterator[Row]:
    """Compile one model for each of ``policies`` and every link."""
    parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    for recompute in policies:
        for share in SHARES:
            device = with_communication(share, [parts.forward, parts.backward])
            wishes: dict[str, Any] = {"recompute": recompute, "hardware": device}
            program, blocking = (compiled(name, overlap=on, **wishes) for on in (True, False))
            own = block_of(program).partitioned
            graph = own.middle_backward
            assert graph is not None
            assert own.backward is not None
            recompute_us, hidden_us = _recomputation(program, graph)
            idle_us = exposed(graph, device) * _communication_us(graph, device)
            yield Row(
                model=name,
                recompute=recompute,
                share=share,
                exposed=exposed(graph, device),
                least=least_exposed(block_of(blocking), device),
                alone=exposed(own.backward, device),
                blocking_bytes=step_memory(blocking).peak_bytes,
                peak_bytes=step_memory(program).peak_bytes,
                recompute_us=recompute_us,
                hidden_us=hidden_us,
                fitting_us=min(recompute_us, hidden_us + idle_us),
                in_a_row=graph is not own.step_backward,
            )


def exposed(graph: Graph, device: Hardware) -> float:
    """Return the part of the communication of ``graph`` that no work hides."""
    work_us = sum(compute_us(node, device) for node in graph.nodes)
    waited_us = elapsed_us(graph, RANKS, device) - work_us
    return max(0.0, waited_us / _communication_us(graph, device))


def _recomputation(program: PlannedProgram, graph: Graph) -> tuple[float, float]:
    """Return the time of what the backward ``graph`` recomputes, and of what the link hides of it.

    The plan's timeline has both, for that function alone.
    """
    block = block_of(program)
    (name,) = [name for name, own in block.partitioned.functions.items() if own is graph]
    spans = program.plan.schedule.functions[block.region.name, name]
    alone = StepTimeline((FunctionRun(block.region.name, "", name, 0.0, spans),))
    again = [span for span in spans if span.recomputed and span.stream == "compute"]
    recompute_us = sum(span.duration_us for span in again)
    return recompute_us, recompute_us - alone.exposed_recompute_us


def least_exposed(block: PartitionedRegion, device: Hardware) -> float:
    """Return a bound on the exposed part of the communication of a backward in the middle of many:
    that of :func:`least_layer_us`."""
    backward = block.partitioned.backward
    assert backward is not None
    kernels_us = graph_tasks(backward, (), device).block.compute_us
    return (least_layer_us(block, device) - kernels_us) / _communication_us(backward, device)


def least_layer_us(block: PartitionedRegion, device: Hardware) -> float:
    """Return a lower bound on the time of a backward in the middle of many, in any order of all.

    Work of all layers may run at the same time, as far as data dependences allow: weight gradients
    at any later time, recomputation at any earlier time. The remaining constraint is the chain from
    layer to layer, from the incoming gradients of a call to its outgoing ones. It runs once per
    layer, and all kernels and collectives of a layer have to run in the same time. Its collectives
    leave gaps that whole kernels seldom fill.
    """
    backward = block.partitioned.backward
    assert backward is not None
    tasks = graph_tasks(backward, (), device)
    grads: Sequence[Node | None] = backward.output_node().args[0]
    passed_on = [
        grad
        for grad, kind in zip(grads, block.region.input_kinds, strict=True)
        if grad is not None and kind not in ("param", "buffer")
    ]
    placeholders = backward.find_nodes(op="placeholder")
    given = placeholders[len(block.partitioned.saved) :]
    on_chain = descendants(given) & ancestors(passed_on)
    chain = [i for i, node in enumerate(tasks.nodes) if node in on_chain]
    many_us = least_of_many_us(tasks.block, chain)
    return max(least_us(_only(tasks.block, chain)), tasks.block.link_us, many_us)


def _only(block: Block, wanted: Sequence[int]) -> Block:
    """Return the tasks ``wanted`` of ``block`` alone; none depend on each other through others."""
    place = {position: index for index, position in enumerate(wanted)}
    tasks = [block.tasks[position] for position in wanted]
    return Block(
        tuple(
            Task(
                needs=tuple(place[needed] for needed in task.needs if needed in place),
                time_us=task.time_us,
                link_us=task.link_us,
                waits_for=None if task.waits_for is None else place[task.waits_for],
            )
            for task in tasks
        )
    )


def print_half_batches(name: str) -> None:
    """Print a line for each link: milliseconds that the step exposes, and its peak."""
    parts = block_of(compiled(name, 2, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    for share in SHARES:
        device = with_communication(share, [parts.forward, parts.backward])
        cells = []
        for halves in (False, True):
            program = compiled(name, 2, hardware=device, half_batches=halves)
            if halves and not _is_split(program):
                cells.append("not split | ")
                continue
            waits = program.plan.schedule.exposed_us
            times = " + ".join(f"{exposed_us / 1000:.2f}" for exposed_us in waits.values())
            cells.append(f"{times} | {bytes_text(step_memory(program).peak_bytes)}")
        print(f"| {name} | {share:.0%} | {' | '.join(cells)} |", flush=True)


def print_half_backwards(name: str, policies: Sequence[str]) -> None:
    """Print a line for each policy: what a layer's backward exposes with half batches, by link."""
    parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    for recompute in policies:
        cells = []
        for share in SHARES:
            # Of a half batch, as of the batch of 1 in the table without.
            device = with_communication(share, [parts.forward, parts.backward])
            program = compiled(name, 2, hardware=device, half_batches=True, recompute=recompute)
            graph = block_of(program).partitioned.middle_backward
            assert graph is not None
            cells.append(f"{exposed(graph, device):.1%}" if _is_split(program) else "not split")
        print(f"| {name} | {recompute} | {' | '.join(cells)} |", flush=True)


def _is_split(program: PlannedProgram) -> bool:
    return not any(note.startswith("half batches:") for note in program.plan.notes)


def print_steps(name: str) -> None:
    """Print a line for each policy, and for a budget of about half of what "selective" keeps."""
    parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    device = with_communication(SHARES[-1], [parts.forward, parts.backward])

    def show(how: str, **options: Any) -> StepMemory:
        program = compiled(name, hardware=device, **options)
        memory = step_memory(program)
        sizes = bytes_text(memory.kept_bytes), bytes_text(memory.peak_bytes)
        cells = name, how, f"{program.plan.step_us / 1000:.2f} ms", *sizes
        print(f"| {' | '.join(cells)} |", flush=True)
        return memory

    selective = show("selective, without overlap", recompute="selective", overlap=False)
    # Without memory the model is captured as on the CPU. GPT is the one with dropout in attention.
    ways = [("", "eager", ()), (", Inductor", "inductor", ())]
    on_gpu = [(", attention as on a GPU", "eager", ("cpu",))] if name == "GPT" else []
    for how, backend, devices in (*ways, *on_gpu):
        with mock.patch.object(fuse_attention, "DEVICES", devices):
            for policy in POLICIES[:2]:
                show(policy + how, recompute=policy, backend=backend)
    # Of the peak's other bytes none can be saved, and in GPT's prologue are nearly as many.
    budget = selective.peak_bytes - round(0.45 * selective.kept_bytes)
    show("auto", recompute="auto", memory_budget=budget)


def _hidden_text(row: Row) -> str:
    if not row.fitting_us:
        return f"{time_text(row.recompute_us)} | "
    hidden = f"{row.hidden_us / row.fitting_us:.1%} of {time_text(row.fitting_us)}"
    return f"{time_text(row.recompute_us)} | {hidden}"


def print_head(*columns: str) -> None:
    """Print the first two lines of a table in Markdown."""
    print(f"| {' | '.join(columns)} |")
    print(f"|{' --- |' * len(columns)}")


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recompute", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--half-batches", action="store_true", help="compare with half batches")
    parser.add_argument("--steps", action="store_true", help="compare the times of steps")
    options = parser.parse_args()
    if options.steps:
        print_head("model", "recompute", "step", "kept", "peak")
        for name in options.models:
            print_steps(name)
        return
    if options.half_batches:
        print_head("model", "communication", "full batch, ms", "peak", "half batches, ms", "peak")
        for name in options.models:
            print_half_batches(name)
        print_head("model", "recompute", *(f"{share:.0%}" for share in SHARES))
        for name in options.models:
            print_half_backwards(name, options.recompute)
        return
    figures = "exposed", "at least", "alone", "peak, without", "recompute", "hidden"
    print_head("model", "recompute", "communication", *figures)
    for name in options.models:
        for row in rows(name, options.recompute):
            alone = f"{row.alone:.1%}" if row.in_a_row else ""
            print(
                f"| {row.model} | {row.recompute} | {row.share:.0%} | {row.exposed:.1%} "
                f"| {row.least:.1%} | {alone} | {bytes_text(row.peak_bytes)}, "
                f"{bytes_text(row.blocking_bytes)} | {_hidden_text(row)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
