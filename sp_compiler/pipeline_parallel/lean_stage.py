"""A stage of torch.distributed.pipelining that holds each value only while it is needed.

With ``M`` microbatches, ``p`` of them in flight::

                                torch's stage           this one
    received activations        M buffers, for good     from receive to backward: p
    received gradients          M buffers, for good     from receive to backward: 1
    sent activations            forward to backward: p  until they are sent: 1

From torch 2.15 on, torch's stage receives in the same way (this class then finds no buffers to
move), and frees what it sent once the schedule has waited for the message.

The backward of a sent value starts from its edge in autograd's graph, which has its shape; nothing
reads its data any more. If another call of the stage has saved the value, it stays alive for that
call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

_NOWHERE = torch.device("meta")


class LeanStage(PipelineStage):
    """A stage of torch; arguments as for the base class."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._allocating_nothing():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._allocating_nothing():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _allocating_nothing(self) -> Iterator[None]:
        """Context in which torch's buffers are on the meta device: they only describe messages."""
        device, self.device = self.device, _NOWHERE
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class, into new memory."""
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class, into new memory."""
        if self.has_backward and not self.is_last:
            _move(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """As in the base class; a missing gradient is replaced by zeros."""
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
        infos = self.grad_recv_info[mb_index]
        for info, grad in zip(infos, next_stage_bwd_outputs, strict=True):
            # Torch zeroes the buffer or, in other versions, keeps it; here it has no memory yet.
            if grad is None and info.buffer is not None:
                info.buffer = torch.zeros_like(info.buffer, device=self.device)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As in the base class, but values to send are not returned, because a schedule would hold
        them."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move(self.args_recv_info[fwd_chunk_id], _NOWHERE)
        ranks = self.stage_index_to_group_rank
        if not self.is_last and ranks[self.stage_index + 1] != self.group_rank:
            return ()
        if not self.is_last or not self.has_backward:
            self._let_go(fwd_chunk_id)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class, with contiguous tensors, which only the operations hold."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.is_last:
            self._let_go(fwd_chunk_id)
        return _in_order(ops)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class, with contiguous tensors."""
        return _in_order(super().get_bwd_send_ops(bwd_chunk_id))

    def _let_go(self, chunk: int) -> None:
        """Keep only the edges in autograd's graph of a forward's results."""
        if hasattr(self, "_forward_chunk_states"):
            # Torch 2.15 does so once the schedule has waited for the message, and not at all for a
            # stage on the same rank or if gradients of weights are delayed.
            state = self._forward_chunk_states.pop(chunk)
            if self.has_backward:
                state.output_grad_edges = _edges(state.live_outputs)
                state.live_outputs = [None] * len(state.live_outputs)
                self._forward_chunk_states[chunk] = state
            return
        outputs, inputs = self.fwd_cache.pop(chunk)
        if self.has_backward:
            self.fwd_cache[chunk] = _edges(outputs), inputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """As in the base class."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _move(self.grad_recv_info[bwd_chunk_id], _NOWHERE)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """As in the base class, but from what :meth:`_let_go` keeps."""
        edges = bwd_kwargs["stage_output"]
        if isinstance(edges, Tensor):  # the loss
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # Schedules that split a backward get the gradients of weights from ``dw_builder``.
        assert backward_type == "full"
        flowing = [
            (edge, grad)
            for edge, grad in zip(edges, bwd_kwargs["output_grads"], strict=True)
            if edge is not None
        ]
        starts: list[GradientEdge] = [edge for edge, _ in flowing]
        torch.autograd.backward(starts, [grad for _, grad in flowing])
        return tuple(map(_taken_gradient, bwd_kwargs["input_values"])), None


def _edges(outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    return tuple(get_gradient_edge(out) if out.requires_grad else None for out in outputs)


def _taken_gradient(value: Any) -> Tensor | None:
    """Return the gradient of an input, which only its message holds from here on."""
    if not isinstance(value, Tensor):
        return None
    grad, value.grad = value.grad, None
    return grad


def _in_order(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    """Make the tensors that ``ops`` send contiguous: a transposed view (T5's bias) is not."""
    for op in ops:
        # Messages are received into a contiguous buffer, element by element.
        op.tensor = op.tensor.contiguous()
    return ops


def _move(infos: Sequence[Any], device: torch.device) -> None:
    """Allocate a new buffer on ``device`` for a received value, without copying the old one."""
    for info in infos:
        # The inputs of the first stage, and values without a gradient, are not received.
        buffer = getattr(info, "buffer", None)
        if buffer is not None and buffer.device != device:
            # Not empty_like, which for a meta tensor runs Python code, and takes 20 times as long.
            info.buffer = torch.empty(
                buffer.shape, dtype=buffer.dtype, device=device, requires_grad=buffer.requires_grad
            )
