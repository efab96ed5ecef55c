"""The plain GPT of the activation-recomputation paper, as a user would write it.

Source of the layer and of the presets: Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198, section 4 and table 3. Nothing in this file knows about
parallelism: it is the unmodified model that every benchmark compiles or re-implements.

Symbols used in shapes: ``b`` batch, ``s`` sequence, ``h`` hidden, ``a`` heads, ``d = h / a``,
``v`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size and options of a :class:`PlainGPT`.

    Args:
        vocab_size: ``v``.
        num_positions: longest sequence.
        hidden_size: ``h``; a multiple of ``num_heads``.
        num_layers: number of blocks.
        num_heads: ``a``.
        dropout: probability of all dropouts except the one on attention probabilities.
        attention_dropout: probability of the dropout on attention probabilities.
        fused_qkv: one ``Linear(h, 3h)`` split in three, else three ``Linear(h, h)``.
        tied_head: the output head uses the token embedding's weight.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: ``hidden_size`` is not a multiple of ``num_heads``.
    """

    vocab_size: int = 51200
    num_positions: int = 2048
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    fused_qkv: bool = True
    tied_head: bool = True
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head, ``h / a``."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class PaperSetup:
    """One row of the paper's table 3: a model and how it was run.

    Args:
        model: the model's size.
        tensor_parallel: ranks of a tensor-parallel group, ``t``.
        pipeline_parallel: pipeline stages, ``p``.
        micro_batch: sequences in one microbatch.
        global_batch: sequences in one step.
    """

    model: GPTConfig
    tensor_parallel: int = 8
    pipeline_parallel: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    sequence_length: int = 2048


def _paper(num_heads: int, hidden_size: int, num_layers: int) -> GPTConfig:
    return GPTConfig(num_heads=num_heads, hidden_size=hidden_size, num_layers=num_layers)


PAPER_SETUPS: Mapping[str, PaperSetup] = MappingProxyType(
    {
        "gpt-22b": PaperSetup(model=_paper(64, 6144, 48), micro_batch=4, global_batch=4),
        "gpt3-175b": PaperSetup(model=_paper(96, 12288, 96), pipeline_parallel=8, global_batch=64),
        "mt-nlg-530b": PaperSetup(
            model=_paper(128, 20480, 105), pipeline_parallel=35, global_batch=280
        ),
        "gpt-1t": PaperSetup(model=_paper(160, 25600, 128), pipeline_parallel=64, global_batch=512),
    }
)

PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {name: setup.model for name, setup in PAPER_SETUPS.items()}
)


class GPTOutput(NamedTuple):
    """Output of :class:`PlainGPT` when it is given labels."""

    loss: Tensor
    logits: Tensor


class Attention(nn.Module):
    """Causal self-attention with an explicit softmax: (b, s, h) -> (b, s, h)."""

    causal_mask: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = config.head_dim
        self.scale = 1.0 / math.sqrt(config.head_dim)
        self.fused_qkv = config.fused_qkv
        if config.fused_qkv:
            self.qkv = nn.Linear(hidden, 3 * hidden)
        else:
            self.query = nn.Linear(hidden, hidden)
            self.key = nn.Linear(hidden, hidden)
            self.value = nn.Linear(hidden, hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.attention_dropout = nn.Dropout(config.attention_dropout)
        self.dropout = nn.Dropout(config.dropout)
        size = config.num_positions
        above = torch.ones(size, size, dtype=torch.bool).triu(1)
        self.register_buffer("causal_mask", above.view(1, 1, size, size), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        if self.fused_qkv:
            query, key, value = self.qkv(hidden).split(width, dim=-1)
        else:
            query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        context = self.core(self._heads(query), self._heads(key), self._heads(value))
        context = context.transpose(1, 2).reshape(batch, length, -1)
        return self.dropout(self.projection(context))

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The paper's attention core: (b, a, s, d) three times -> (b, a, s, d)."""
        length = query.shape[-2]
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(self.causal_mask[:, :, :length, :length], float("-inf"))
        probabilities = self.attention_dropout(torch.softmax(scores, dim=-1))
        return torch.matmul(probabilities, value)

    def _heads(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, a, s, d)."""
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Two linears around an exact GELU: (b, s, h) -> (b, s, 4h) -> (b, s, h)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(hidden))))


class Block(nn.Module):
    """Pre-LN transformer layer: attention, then MLP, each inside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class PlainGPT(nn.Module):
    """The paper's GPT on one device.

    Args:
        config: size and options.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_positions, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tied_head:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> GPTOutput | tuple[Tensor]:
        """Logits of the next token, and the mean loss when ``labels`` are given.

        Args:
            input_ids: (b, s) int64.
            labels: (b, s) int64, not shifted: usually ``input_ids`` itself; -100 is ignored.

        Returns:
            ``(logits,)`` with logits (b, s, v), or ``GPTOutput(loss, logits)``.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.token_embedding(input_ids) + self.position_embedding(positions)
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.final_norm(hidden))
        if labels is None:
            return (logits,)
        shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(shifted, labels[:, 1:].reshape(-1))
        return GPTOutput(loss, logits)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
