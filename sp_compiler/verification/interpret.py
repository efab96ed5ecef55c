"""Graphs of one rank run node by node instead of as generated text, to find the pass that broke.

Both classes have the interface of :class:`sp_compiler.ir.compiled_program.RegionCode`, so the
executor runs them in place of generated classes, on real or simulated ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from sp_compiler.base.placement import Placement
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import carries_gradient
from sp_compiler.ir.program import Region
from sp_compiler.ir.symbolic import SizedInterpreter
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.convert import CONVERSIONS


class ShardedCode:
    """A sharded region under torch's own autograd; conversions bring their dual as gradient.

    Args:
        region: after sharding.
        differentiable: for each output whether ``backward`` takes a tangent for it.
    """

    def __init__(self, region: Region, differentiable: Sequence[bool]) -> None:
        self._module = region.module
        self._needs_grad = [bool(n.meta.get("requires_grad")) for n in region.placeholders]
        self._differentiable = tuple(differentiable)

    def forward(self, tp: Communicator, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_(needs and carries_gradient(value))
                if isinstance(value, Tensor)
                else value
                for value, needs in zip(inputs, self._needs_grad, strict=True)
            ]
            outputs = tuple(_RankInterpreter(self._module, tp, with_grad=True).run(*leaves))
        return tuple(value.detach() for value in outputs), (_Tape(leaves, outputs),)

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        (tape,) = saved
        flowing = [
            value for value, used in zip(tape.outputs, self._differentiable, strict=True) if used
        ]
        pairs = [pair for pair in zip(flowing, tangents, strict=True) if pair[0].requires_grad]
        wanted = [leaf for leaf in tape.leaves if _is_wanted(leaf)]
        grads = iter(
            torch.autograd.grad(
                [value for value, _ in pairs],
                wanted,
                [tangent for _, tangent in pairs],
                allow_unused=True,
            )
        )
        return tuple(next(grads) if _is_wanted(leaf) else None for leaf in tape.leaves)


def _is_wanted(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


@dataclass(frozen=True, eq=False)
class _Tape:
    leaves: Sequence[Tensor]
    outputs: Sequence[Tensor]


class PartitionedCode:
    """The forward and backward graphs of a region, as the code generator got them."""

    def __init__(self, partitioned: Partitioned) -> None:
        self._parts = partitioned

    def forward(self, tp: Communicator, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        module = GraphModule(nn.Module(), self._parts.forward)
        results = _RankInterpreter(module, tp, with_grad=False).run(*inputs)
        return results[: self._parts.num_outputs], results[self._parts.num_outputs :]

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        assert self._parts.backward is not None
        return _gradients(self._parts.backward, tp, saved, *tangents)

    def loss_backward(self, tp: Communicator, saved: Any, tangent: Tensor) -> tuple[Any, ...]:
        assert self._parts.loss is not None
        return _gradients(self._parts.loss.backward, tp, saved, tangent)


def _gradients(graph: Graph, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
    module = GraphModule(nn.Module(), graph)
    return tuple(_RankInterpreter(module, tp, with_grad=False).run(*saved, *tangents))


class _RankInterpreter(SizedInterpreter):
    """Gives the opaque operators their meaning on the ranks behind ``tp``."""

    def __init__(self, module: GraphModule, tp: Communicator, *, with_grad: bool) -> None:
        super().__init__(module)
        self._tp = tp
        self._with_grad = with_grad

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.view.default:  # strides need not be those that were traced
            return args[0].reshape(args[1])
        if getattr(target, "namespace", "") != "sp_compiler":
            return super().call_function(target, args, kwargs)
        name = target.__name__.partition(".")[0]
        if self._with_grad:
            return _WITH_GRAD[name].apply(self._tp, *args)
        return _call(self._tp, name, args)


def _call(tp: Communicator, name: str, args: Sequence[Any]) -> Any:
    """The method of ``tp`` for the operator ``name``."""
    if name == "convert":
        return _convert(tp, *args[:3])
    if name == "wait":
        return args[0]  # of a collective that was not only started
    method = getattr(tp, name)
    takes_world = "world_size" in inspect.signature(method).parameters
    return method(*(args if takes_world else args[:-1]))


def _convert(tp: Communicator, x: Tensor, src: str, dst: str) -> Tensor:
    method = CONVERSIONS[Placement.parse(src).kind, Placement.parse(dst).kind].method
    converted: Tensor = getattr(tp, method)(x, src, dst) if method else x
    return converted


class _Convert(torch.autograd.Function):
    """The gradient is converted from the dual of the destination to the dual of the source."""

    @staticmethod
    def forward(
        ctx: Any, tp: Communicator, x: Tensor, src: str, dst: str, world_size: int
    ) -> Tensor:
        ctx.tp, ctx.src, ctx.dst = tp, src, dst
        converted = _convert(tp, x, src, dst)
        return x.view_as(x) if converted is x else converted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        source, target = (Placement.parse(text).dual for text in (ctx.dst, ctx.src))
        grad = _convert(ctx.tp, grad.contiguous(), str(source), str(target))
        return None, grad, None, None, None


class _PadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: Communicator, x: Tensor, world_size: int) -> Tensor:
        ctx.tp, ctx.rows = tp, x.shape[0]
        return tp.pad_rows(x.view_as(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.tp.cut_rows(grad, ctx.rows), None


class _CutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: Communicator, x: Tensor, rows: int, world_size: int) -> Tensor:
        ctx.tp = tp
        return tp.cut_rows(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.tp.pad_rows_with_zeros(grad), None, None


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: Communicator, weight: Tensor, ids: Tensor, num_rows: int, world_size: int
    ) -> Tensor:
        ctx.tp, ctx.num_rows = tp, weight.shape[0]
        ctx.save_for_backward(ids)
        return tp.vocab_embedding(weight, ids, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        return None, ctx.tp.vocab_embedding_backward(grad, ids, ctx.num_rows), None, None, None


class _VocabNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: Communicator, logits: Tensor, target: Tensor, *rest: int
    ) -> tuple[Tensor, Tensor]:
        nll, logsumexp = tp.vocab_nll(logits, target, *rest[:-1])  # without the world_size
        ctx.tp, ctx.rest = tp, rest[:-1]
        ctx.mark_non_differentiable(logsumexp)
        ctx.save_for_backward(logits, target, logsumexp)
        return nll, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grad = ctx.tp.vocab_nll_backward(grad, *saved, *ctx.rest)
        return None, grad, None, None, None, None


class _Dropout(torch.autograd.Function):
    """Linear, and its own gradient."""

    @staticmethod
    def forward(ctx: Any, tp: Communicator, x: Tensor, *rest: Any) -> Tensor:
        ctx.tp, ctx.rest = tp, rest
        return tp.dropout(x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.tp.dropout(grad, *ctx.rest), *[None] * len(ctx.rest)


class _DropoutMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: Communicator, x: Tensor, *rest: Any) -> Tensor:
        mask = tp.dropout_mask(x, *rest)
        ctx.mark_non_differentiable(mask)
        return mask

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        return (None,) * len(ctx.needs_input_grad)


_WITH_GRAD: dict[str, Any] = {
    "convert": _Convert,
    "pad_rows": _PadRows,
    "cut_rows": _CutRows,
    "vocab_embedding": _VocabEmbedding,
    "vocab_nll": _VocabNll,
    "dropout": _Dropout,
    "dropout_mask": _DropoutMask,
}
