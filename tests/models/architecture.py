"""One row of the table of architectures: sizes, and how to build and call a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

LAYERS = 2
Kwargs = dict[str, Any]
OMIT = object()
"""As a field of a configuration: one of the common fields that it must not be given."""


@dataclass(frozen=True)
class Size:
    """Widths of a configuration; ``head`` is the width of one head, ``dropout`` a probability."""

    heads: int
    kv: int
    hidden: int
    ffn: int
    vocab: int
    batch: int
    seq: int
    experts: int
    dropout: float = 0.0

    @property
    def head(self) -> int:
        return self.hidden // self.heads


DIVIDING = Size(heads=8, kv=8, hidden=64, ffn=128, vocab=128, batch=2, seq=12, experts=8)
GROUPED = Size(heads=8, kv=4, hidden=64, ffn=128, vocab=128, batch=2, seq=12, experts=8)
AWKWARD = Size(heads=4, kv=2, hidden=48, ffn=100, vocab=131, batch=3, seq=11, experts=6)
CONFIGURATIONS = ("dividing", "awkward")
RANKS = (2, 4, 8)


def size(configuration: str, ranks: int) -> Size:
    """Sizes for a number of ranks: what divides must divide by it."""
    if configuration == "awkward":
        return AWKWARD
    return DIVIDING if ranks == 8 else GROUPED


@dataclass(frozen=True)
class Architecture:
    """Recipe to build and call one model.

    Attributes:
        make: from a size to the model, not yet randomised.
        inputs: from a size and a generator to the keyword arguments of a call.
        decoder_only: a language model of one causal stack.
    """

    make: Callable[[Size], nn.Module]
    inputs: Callable[[Size, torch.Generator], Kwargs]
    decoder_only: bool = False


TABLE: dict[str, Architecture] = {}
"""Every architecture, in a fixed order."""


def hf_config(config_class: str, dropout: float, /, **fields: Any) -> Any:
    """A configuration with ``dropout`` for every probability of dropping an element.

    Never a layer or a path: which of them run would differ from step to step.
    """
    config = getattr(transformers, config_class)(**fields)
    nested = [
        value for value in vars(config).values() if isinstance(value, type(config).__mro__[1])
    ]
    for item in (config, *nested):
        for field, value in vars(item).items():
            if "drop" in field and isinstance(value, float):
                elements = "dropout" in field or "pdrop" in field
                setattr(item, field, dropout if elements else 0.0)
    return config


def common_fields(size: Size) -> Kwargs:
    """Sizes by the names that most configurations use; the others ignore them."""
    return {
        "vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.ffn,
        "num_hidden_layers": LAYERS, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv, "max_position_embeddings": 64, "use_cache": False,
        "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def random_ids(size: Size, generator: torch.Generator, seq: int | None = None) -> Tensor:
    return torch.randint(2, size.vocab, (size.batch, seq or size.seq), generator=generator)


def random_labels(size: Size, generator: torch.Generator) -> Tensor:
    labels = random_ids(size, generator)
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)


def tokens(size: Size, generator: torch.Generator) -> Kwargs:
    return {"input_ids": random_ids(size, generator), "labels": random_labels(size, generator)}


def add(
    name: str,
    family: str,
    extra: Callable[[Size], Kwargs] = lambda size: {},
    *,
    model: str = "ForCausalLM",
    config: str | None = None,
    attention: str = "sdpa",
    experts: str | None = None,
    inputs: Callable[[Size, torch.Generator], Kwargs] = tokens,
) -> None:
    """One HuggingFace model: class names from ``family``, sizes from the common table and extra."""

    def make(size: Size) -> nn.Module:
        fields = {**common_fields(size), **extra(size)}
        fields = {key: value for key, value in fields.items() if value is not OMIT}
        made = hf_config(config or f"{family}Config", size.dropout, **fields)
        made._attn_implementation = attention
        if experts is not None:
            made._experts_implementation = experts
        return getattr(transformers, f"{family}{model}")(made)

    decoder_only = model in ("ForCausalLM", "LMHeadModel")
    TABLE[name] = Architecture(make, inputs, decoder_only)
