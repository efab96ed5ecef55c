"""Small GPTs on an emulated group of two ranks, in whose backwards layers work for each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph

import sp_compiler
from benchmarks.models import GPTConfig, PlainGPT
from sp_compiler.cost.hardware import Link, hardware_of
from sp_compiler.inductor import fused
from sp_compiler.inductor.lowering import Traced

# Communication takes a quarter of a small block's time.
SLOW = replace(
    hardware_of("h100"),
    interconnect={kind: Link(0.0, 200.0) for kind in hardware_of("h100").interconnect},
)
IDS = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
INPUTS = {"input_ids": IDS, "labels": IDS}
LAYERS = 4


def gpt(**options: Any) -> PlainGPT:
    """A model of four layers in float64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "num_layers": LAYERS, "num_positions": 32}
    config = GPTConfig(**{"vocab_size": 2048, "tied_head": False, **sizes, **options})
    return PlainGPT(config).double()


def compiled(change: Callable[[PlainGPT], Any] = id, **options: Any) -> Any:
    """A module of :func:`gpt` after ``change``."""
    model = gpt()
    change(model)
    return sp_compiler.compile(model, example_inputs=((), INPUTS), tp=2, hardware=SLOW, **options)


def loss_of(module: Any, ids: Tensor = IDS) -> Tensor:
    """The loss of one forward, always with the same dropout."""
    torch.manual_seed(2)
    loss: Tensor = module(input_ids=ids, labels=ids).loss
    return loss


def take_gradients(module: Any) -> dict[str, Tensor]:
    """Gradients by parameter, which has none afterwards."""
    grads = {
        name: each.grad.to_local().clone()
        for name, each in module.named_parameters()
        if each.grad is not None
    }
    module.zero_grad()
    return grads


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether gradients are equal to the bit."""
    return one.keys() == other.keys() and all(map(torch.equal, one.values(), other.values()))


@contextmanager
def functions(module: Any, names: Collection[str]) -> Iterator[list[str]]:
    """List those of the functions ``names`` of blocks that run."""
    ran: list[str] = []
    code = module._sp_state.latest.codes["Block"]

    def listed(name: str, function: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            ran.append(name)
            return function(*args)

        return staticmethod(run)

    replaced = {name: listed(name, getattr(code, name)) for name in names}
    with mock.patch.multiple(code, **replaced):
        yield ran


@contextmanager
def graphs_interpreted() -> Iterator[None]:
    """Run functions for Inductor as graphs, without the minute that compiling them takes."""

    def interpreted(traced: Traced) -> Callable[[list[Any]], Any]:
        return lambda values: traced.module(*values)

    with mock.patch.object(fused, "compile_graph", interpreted):
        yield


def step_on_a_rank(names: Collection[str], recompute: str) -> tuple[list[str], bool]:
    """Which of the functions ``names`` ran in backward, and whether gradients are those of a step
    without overlap."""
    alone, module = (compiled(overlap=each, recompute=recompute) for each in (False, True))
    loss_of(alone).backward()
    with functions(module, names) as ran:
        loss_of(module).backward()
    return ran, same(take_gradients(alone), take_gradients(module))


def nodes_of(graph: Graph) -> list[str]:
    """One line a node: placeholders with a ``*`` are handed over, the last line is returned."""
    lines = []
    for node in graph.nodes:
        names = ", ".join(source.name for source in node.all_input_nodes)
        if node.op == "placeholder":
            lines.append(node.name + "*" * bool(node.meta.get("handed")))
        else:
            lines.append(f"{node.name} = {names}")
    return lines
