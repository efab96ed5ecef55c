"""The plain GPT with hand-written tensor and sequence parallelism, after Megatron-LM.

Code as an expert would write it: plain local tensors, no DTensor, column- and row-parallel linears,
vocab-parallel embedding and loss, replicated gradients reduced in one flat all-reduce. It loads the
weights of a :class:`benchmarks.models.PlainGPT`, so both can be compared number by number.

Activations are (s, b, h). With sequence parallelism they are (s/t, b, h) outside the linears.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.peers.parallel_functions import (
    ColumnParallelLinear,
    ReduceFromTensorParallel,
    ReduceScatterToSequence,
    VocabParallelCrossEntropy,
    all_gather,
    all_reduce,
)
from benchmarks.peers.recompute import Recompute

IGNORE_INDEX = -100
# The dim that is sharded, by the last part of a parameter's name; all others are replicated.
SHARDED_DIM = {
    "token_embedding": 0,
    "qkv_weight": 0,
    "qkv_bias": 0,
    "projection_weight": 1,
    "up_weight": 0,
    "up_bias": 0,
    "down_weight": 1,
}


class RankStream:
    """A random stream of this rank's own beside torch's, which all ranks advance alike.

    Dropouts on sharded values must differ between ranks, those on replicated ones must not.

    Args:
        device: where the dropouts are; a GPU has a generator of its own.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.state = torch.Generator(device).manual_seed(seed).get_state()
        if device.type == "cuda":
            self._default = torch.cuda.default_generators[device.index]
        else:
            self._default = torch.default_generator

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Inside, torch's default generator is this stream."""
        shared = self._default.get_state()
        self._default.set_state(self.state)
        try:
            yield
        finally:
            self.state = self._default.get_state()
            self._default.set_state(shared)

    @contextlib.contextmanager
    def replay(self, state: Tensor) -> Iterator[None]:
        """Inside, the stream continues from ``state``; afterwards from where it was."""
        current, self.state = self.state, state
        try:
            yield
        finally:
            self.state = current


@dataclass(frozen=True)
class Parallel:
    """Settings of a run: its group, whether tokens are sharded, what is recomputed, and whether
    attention is PyTorch's own."""

    group: ProcessGroup
    sequence_parallel: bool
    recompute: Recompute
    stream: RankStream
    fused_attention: bool

    @property
    def size(self) -> int:
        return self.group.size()

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's share of ``x`` along ``dim``."""
        return x.chunk(self.size, dim)[self.group.rank()]

    def leave(self, x: Tensor) -> Tensor:
        """End of a tensor-parallel region: partial sums to shards, or to wholes."""
        if self.sequence_parallel:
            return ReduceScatterToSequence.apply(x, self.group)
        return ReduceFromTensorParallel.apply(x, self.group)

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Start of a tensor-parallel region: the column-parallel linear."""
        return ColumnParallelLinear.apply(x, weight, bias, self.group, self.sequence_parallel)

    def token_dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout outside the tensor-parallel regions."""
        if self.sequence_parallel:
            return self.rank_dropout(x, p, training)
        return F.dropout(x, p, training)

    def rank_dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout whose mask differs between ranks."""
        if not training or p == 0.0:
            return x
        with self.stream.fork():
            return F.dropout(x, p, training)

    def rank_attention(
        self, query: Tensor, key: Tensor, value: Tensor, p: float, training: bool
    ) -> Tensor:
        """Causal attention by PyTorch's kernels, whose dropout has another mask on each rank."""
        dropped = p if training else 0.0
        with self.stream.fork() if dropped else contextlib.nullcontext():
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropped, is_causal=True
            )

    def recomputed(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """``function(*args)``, keeping only ``args``."""
        state = self.stream.state
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self.stream.replay(state)),
        )


class ShardedAttention(nn.Module):
    """Causal self-attention over this rank's heads."""

    causal_mask: Tensor

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, local = config.hidden_size, config.hidden_size // parallel.size
        self.config, self.parallel = config, parallel
        self.qkv_weight = nn.Parameter(torch.empty(3 * local, hidden))
        self.qkv_bias = nn.Parameter(torch.empty(3 * local))
        self.projection_weight = nn.Parameter(torch.empty(hidden, local))
        self.projection_bias = nn.Parameter(torch.empty(hidden))
        above = torch.ones(config.num_positions, config.num_positions, dtype=torch.bool).triu(1)
        self.register_buffer("causal_mask", above, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        parallel = self.parallel
        qkv = parallel.column(hidden, self.qkv_weight, self.qkv_bias)
        if parallel.recompute == "attention" and torch.is_grad_enabled():
            context = parallel.recomputed(self._core, qkv)
        else:
            context = self._core(qkv)
        partial = F.linear(context, self.projection_weight)
        output = parallel.leave(partial) + self.projection_bias
        return parallel.token_dropout(output, self.config.dropout, self.training)

    def _core(self, qkv: Tensor) -> Tensor:
        """(s, b, 3h/t), each head's query, key and value side by side -> (s, b, h/t)."""
        length, batch, _ = qkv.shape
        if self.parallel.fused_attention:
            heads = qkv.view(length, batch, -1, 3 * self.config.head_dim).permute(1, 2, 0, 3)
            query, key, value = heads.chunk(3, -1)
            context = self.parallel.rank_attention(
                query, key, value, self.config.attention_dropout, self.training
            )
            return context.permute(2, 0, 1, 3).reshape(length, batch, -1)
        heads = qkv.view(length, -1, 3 * self.config.head_dim).transpose(0, 1)
        query, key, value = heads.chunk(3, -1)
        scores = torch.bmm(query, key.transpose(1, 2)) * (1.0 / math.sqrt(self.config.head_dim))
        scores = scores.masked_fill(self.causal_mask[:length, :length], float("-inf"))
        probabilities = torch.softmax(scores, -1)
        probabilities = self.parallel.rank_dropout(
            probabilities, self.config.attention_dropout, self.training
        )
        return torch.bmm(probabilities, value).transpose(0, 1).reshape(length, batch, -1)


class ShardedMLP(nn.Module):
    """Column-parallel linear, GELU, row-parallel linear, dropout."""

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, local = config.hidden_size, 4 * config.hidden_size // parallel.size
        self.config, self.parallel = config, parallel
        self.up_weight = nn.Parameter(torch.empty(local, hidden))
        self.up_bias = nn.Parameter(torch.empty(local))
        self.down_weight = nn.Parameter(torch.empty(hidden, local))
        self.down_bias = nn.Parameter(torch.empty(hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.gelu(self.parallel.column(hidden, self.up_weight, self.up_bias))
        output = self.parallel.leave(F.linear(inner, self.down_weight)) + self.down_bias
        return self.parallel.token_dropout(output, self.config.dropout, self.training)


class ShardedBlock(nn.Module):
    """Pre-LN transformer layer on one rank."""

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = ShardedAttention(config, parallel)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ShardedMLP(config, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class MegatronStyleGPT(nn.Module):
    """One rank's part of a :class:`PlainGPT`, tensor- and (if asked) sequence-parallel.

    After ``loss.backward()`` call :meth:`finish_gradients`.

    Args:
        model: the model to take the weights of; it is not modified.
        group: the tensor-parallel group.
        sequence_parallel: shard tokens outside the linears.
        recompute: nothing, the attention core (the paper's selective recomputation), or each block.
        seed: of the ranks' own dropout streams.
        fused_attention: by PyTorch's kernels instead of written out.

    Raises:
        ValueError: heads, vocabulary or hidden size are not divisible by the group's size, or the
            head is not tied.
    """

    def __init__(
        self,
        model: PlainGPT,
        group: ProcessGroup,
        *,
        sequence_parallel: bool = True,
        recompute: Recompute = "none",
        seed: int = 0,
        fused_attention: bool = False,
    ) -> None:
        super().__init__()
        config = model.config
        for name in ("num_heads", "vocab_size", "hidden_size"):
            if getattr(config, name) % group.size():
                raise ValueError(
                    f"{name}={getattr(config, name)}: not a multiple of {group.size()}"
                )
        if not config.tied_head:
            raise ValueError("tied_head=False: this peer has the tied head only")
        device = next(model.parameters()).device
        stream = RankStream(seed * group.size() + group.rank(), device)
        parallel = Parallel(group, sequence_parallel, recompute, stream, fused_attention)
        self.config, self.parallel = config, parallel
        self.token_embedding = nn.Parameter(
            torch.empty(config.vocab_size // group.size(), config.hidden_size)
        )
        self.position_embedding = nn.Parameter(
            torch.empty(config.num_positions, config.hidden_size)
        )
        self.blocks = nn.ModuleList(ShardedBlock(config, parallel) for _ in model.blocks)
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.to(next(model.parameters()).dtype)
        whole = _fused_state(model)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(_shard(name, whole[_plain_name(name)], config, parallel))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the next token; ``input_ids`` and ``labels`` are (b, s), whole on all ranks.

        Raises:
            ValueError: sequence parallelism and ``s`` is not a multiple of the group's size.
        """
        parallel = self.parallel
        length = input_ids.shape[1]
        if parallel.sequence_parallel and length % parallel.size:
            raise ValueError(f"sequence of {length} tokens: not a multiple of {parallel.size}")
        hidden = self._embed(input_ids.t())
        for block in self.blocks:
            if parallel.recompute == "full" and torch.is_grad_enabled():
                hidden = parallel.recomputed(block, hidden)
            else:
                hidden = block(hidden)
        logits = parallel.column(self.final_norm(hidden), self.token_embedding, None)
        target = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).t()
        losses = VocabParallelCrossEntropy.apply(logits, target, parallel.group, IGNORE_INDEX)
        return losses.sum() / (target != IGNORE_INDEX).sum()

    def finish_gradients(self) -> None:
        """Sum the gradients of replicated parameters over ranks, in one flat all-reduce."""
        if not self.parallel.sequence_parallel:
            return
        # Of what FSDP2 shards, this rank's part: a sum over other ranks is linear.
        grads = [
            parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            for name, parameter in self.named_parameters()
            if _sharded_dim(name) is None and parameter.grad is not None
        ]
        flat = all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), self.parallel.group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients of the whole parameters, under the names of a :class:`PlainGPT` (qkv fused)."""
        return {
            _plain_name(name): _unshard(name, parameter.grad, self.config, self.parallel.group)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }

    def _embed(self, input_ids: Tensor) -> Tensor:
        """(s, b) -> (s, b, h), or its shard."""
        parallel = self.parallel
        rows = self.token_embedding.shape[0]
        local = input_ids - parallel.group.rank() * rows
        here = (local >= 0) & (local < rows)
        partial = F.embedding(torch.where(here, local, 0), self.token_embedding)
        hidden = parallel.leave(partial * here.unsqueeze(-1))
        positions = self.position_embedding[: input_ids.shape[0]]
        if parallel.sequence_parallel:
            positions = parallel.part(positions, 0)
        hidden = hidden + positions.unsqueeze(1)
        return parallel.token_dropout(hidden, self.config.dropout, self.training)


def _sharded_dim(name: str) -> int | None:
    return SHARDED_DIM.get(name.rsplit(".", 1)[-1])


def _plain_name(name: str) -> str:
    """The parameter's name in :class:`PlainGPT`."""
    if name in {"token_embedding", "position_embedding"}:
        return f"{name}.weight"
    return name.replace("_weight", ".weight").replace("_bias", ".bias")


def _fused_state(model: PlainGPT) -> dict[str, Tensor]:
    """The model's parameters with query, key and value always stacked into one."""
    state = dict(model.state_dict())
    if not model.config.fused_qkv:
        for name in [name for name in state if ".query." in name]:
            parts = [
                state[name.replace(".query.", f".{part}.")] for part in ("query", "key", "value")
            ]
            state[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    return state


def _shard(name: str, whole: Tensor, config: GPTConfig, parallel: Parallel) -> Tensor:
    dim = _sharded_dim(name)
    if dim is None:
        return whole
    if ".qkv_" in name:  # all queries, keys, values to those of each head side by side
        heads = whole.unflatten(0, (3, -1, config.head_dim)).transpose(0, 1)
        return parallel.part(heads, 0).flatten(0, 2)
    return parallel.part(whole, dim)


def _unshard(name: str, part: Tensor, config: GPTConfig, group: ProcessGroup) -> Tensor:
    dim = _sharded_dim(name)
    if dim is None:
        return part
    whole = all_gather(part.movedim(dim, 0), group).movedim(0, dim)
    if ".qkv_" in name:
        return whole.unflatten(0, (-1, 3, config.head_dim)).transpose(0, 1).flatten(0, 2)
    return whole
