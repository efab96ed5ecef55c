"""Autograd functions of hand-written tensor and sequence parallelism, after Megatron-LM.

The four conjugate pairs of Korthikanti et al. (arXiv 2205.05198, section 4) on plain local tensors,
a column-parallel linear whose backward hides its collectives as Megatron-LM's does, and a
vocab-parallel cross entropy. Activations are (s, b, h); sequence shards split dim 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, Work


def start_all_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """(s/t, ...) -> (s, ...), not yet arrived: wait on the second result."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """(s, ...) -> (s/t, ...), not yet arrived: wait on the second result."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return part, dist.reduce_scatter_tensor(part, x.contiguous(), group=group, async_op=True)


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """(s/t, ...) -> (s, ...)."""
    whole, work = start_all_gather(x, group)
    work.wait()
    return whole


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """(s, ...) -> (s/t, ...), summed over ranks."""
    part, work = start_reduce_scatter(x, group)
    work.wait()
    return part


def all_reduce(x: Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor with the reduction over ranks."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=group)
    return result


class ReduceFromTensorParallel(Function):
    """The paper's f-bar: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ReduceScatterToSequence(Function):
    """The paper's g-bar: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class ColumnParallelLinear(Function):
    """``x @ weight.T + bias`` with ``weight`` (out/t, h) sharded by rows.

    With sequence parallelism ``x`` is a shard (s/t, b, h): it is gathered for the product and
    gathered again in backward, and only the shard is kept. Backward follows Megatron-LM's order:
    the input is gathered while the input's gradient is computed, which is reduced while the
    weight's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group, ctx.sequence_parallel = bias is not None, group, sequence_parallel
        whole = all_gather(x, group) if sequence_parallel else x
        return torch.nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            whole, gathered = start_all_gather(x, ctx.group)
            grad_whole = grad.matmul(weight)
            gathered.wait()
            grad_x, reduced = start_reduce_scatter(grad_whole, ctx.group)
        else:
            whole = x
            grad_x = grad.matmul(weight)
            reduced = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        rows = grad.flatten(0, -2)
        grad_weight = rows.t().matmul(whole.flatten(0, -2))
        grad_bias = rows.sum(0) if ctx.has_bias else None
        reduced.wait()
        return grad_x, grad_weight, grad_bias, None, None


class VocabParallelCrossEntropy(Function):
    """Loss of every token from logits sharded by vocabulary: (..., v/t), (...) -> (...).

    Tokens whose target is ``ignore_index`` get zero loss and zero gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup, ignore_index: int
    ) -> Tensor:
        peak = all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        shifted = logits - peak.unsqueeze(-1)
        local = target - group.rank() * logits.shape[-1]
        here = (local >= 0) & (local < logits.shape[-1])
        local = torch.where(here, local, 0)
        picked = all_reduce(shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here, group)
        exponential = shifted.exp_()
        total = all_reduce(exponential.sum(-1), group)
        kept = target != ignore_index
        softmax = exponential.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, here, kept)
        return (total.log() - picked) * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, local, here, kept = ctx.saved_tensors
        minus_one = -here.to(softmax.dtype).unsqueeze(-1)
        grad_logits = softmax.scatter_add(-1, local.unsqueeze(-1), minus_one)
        return grad_logits.mul_((grad * kept).unsqueeze(-1)), None, None, None
