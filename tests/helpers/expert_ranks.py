"""Ranks of the axis "ep" that are threads of one process, and a compiled step on them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator, ExpertRanks
from sp_compiler.options import CompileOptions
from sp_compiler.runtime.executor import Executor


class ThreadRanks(ExpertRanks):
    """One of several threads that exchange rows through a list that they share."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert rows.is_contiguous()
        self._shared[self.rank] = rows.split(list(sent))
        self._barrier.wait()
        arrived = [parts[self.rank] for parts in self._shared]
        assert [len(part) for part in arrived] == list(received)
        result = torch.cat(arrived)
        self._barrier.wait()
        return result


def on_expert_ranks(num_ranks: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """The results of ``function`` on each rank."""
    shared, barrier = [None] * num_ranks, threading.Barrier(num_ranks, timeout=60)

    def run(rank: int) -> Any:
        try:
            return function(Communicator(None, 0, 1, experts=ThreadRanks(rank, shared, barrier)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(run, rank) for rank in range(num_ranks)]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


def compiled(
    model: nn.Module, inputs: Mapping[str, Tensor], num_ranks: int, **options: Any
) -> CompiledProgram:
    return build(model, (), dict(inputs), replace(CompileOptions.of(1, options), ep=num_ranks))  # type: ignore[arg-type]


def step(
    program: CompiledProgram, model: nn.Module, batches: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each rank, and the gradients of the mean loss, as FSDP puts them together."""
    num_ranks = len(batches)

    def run(tp: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        assert tp.experts is not None
        rank = tp.experts.rank
        params: dict[str, Tensor] = {}
        for name, whole in copy.deepcopy(model).named_parameters():
            is_divided = name in program.program.experts
            own = whole.detach().chunk(num_ranks)[rank] if is_divided else whole.detach()
            params[name] = own.clone().requires_grad_()
        leaves = [batches[rank][name] for name in sorted(batches[rank])]
        (loss,) = Executor(program, tp).run(params, dict(model.named_buffers()), leaves).outputs
        loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        return loss.detach(), grads

    results = on_expert_ranks(num_ranks, run)
    grads = {}
    for name, _ in model.named_parameters():
        parts = [found[name] for _, found in results]
        joined = torch.cat(parts) if name in program.program.experts else torch.stack(parts).sum(0)
        grads[name] = joined / num_ranks
    return [loss for loss, _ in results], grads


def truth(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same on one device."""
    model = copy.deepcopy(model)
    losses = [model(**batch) for batch in batches]
    (sum(losses) / len(batches)).backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    return [loss.detach() for loss in losses], grads
