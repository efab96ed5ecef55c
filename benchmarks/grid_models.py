"""Models that are trained on grids and on one device, and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.helpers import grids
from tests.models import zoo

SEQUENCE, SAMPLES = 8, 2  # samples of a microbatch
_COMMON: dict[str, Any] = {
    "vocab_size": 131,  # which no number of ranks divides
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def _gpt2(layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=131, n_positions=32, n_embd=32, n_layer=layers, n_head=8, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(layers: int) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, **_COMMON)
    )


def _mixtral(layers: int) -> nn.Module:
    config = transformers.MixtralConfig(num_hidden_layers=layers, num_local_experts=4, **_COMMON)
    model: Any = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # eager has no other in float64
    return model


def _t5(layers: int) -> nn.Module:
    per_stack = max(2, (layers + 1) // 2)
    config = transformers.T5Config(
        vocab_size=131, d_model=32, d_kv=4, d_ff=48, num_heads=8, num_layers=per_stack,
        num_decoder_layers=per_stack, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "GPT-2, tied, dropout 0.1": _gpt2,
    "Llama, 4 of 8 kv heads": _llama,
    "Mixtral, 4 experts": _mixtral,
    "T5": _t5,
}


@dataclass(frozen=True)
class Training:
    """What is trained, on one device as on any grid.

    Attributes:
        model: of :data:`MODELS`.
        layers: of the model.
        parts: that the data are divided into.
        microbatches: of a step on each part.
    """

    model: str
    layers: int
    parts: int
    microbatches: int

    def build(self) -> nn.Module:
        """The model in float64."""
        model = MODELS[self.model](self.layers)
        zoo.randomise(model, 0)
        return model.double().train()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Of all parts of the data."""
        generator = torch.Generator().manual_seed(step)
        rows = SAMPLES * self.microbatches * self.parts
        ids, labels = (
            torch.randint(0, 131, (rows, SEQUENCE), generator=generator) for _ in range(2)
        )
        return {"input_ids": ids, "labels": labels}

    def microbatch(self) -> dict[str, Tensor]:
        """An example."""
        return grids.split(self.batch(0), self.parts * self.microbatches)[0]
