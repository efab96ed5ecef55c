"""Time of each region on an accelerator, as a plan with a profile of it says and as measured.

Regions are large enough for the host to be ahead of the device. Run by
``python -m benchmarks.gpu --only regions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import transformers
from torch import nn

import sp_compiler
from benchmarks.contenders import plain_gpt, random_ids
from benchmarks.gpu_clock import elapsed_ms, mark
from benchmarks.models import GPTConfig
from benchmarks.region_times import Clock, Row, compare

LAYERS, DROPOUT = 1, 0.1
BATCH, LENGTH, WIDTH, VOCABULARY = 4, 2048, 4096, 8192
DEVICE_TIME = Clock(mark, elapsed_ms)


def regions(device: str, *, small: bool, rounds: int) -> Iterator[Row]:
    """A GPT and a Llama on one rank, in 16 bits on an accelerator."""
    sizes = (64, 32) if small else (WIDTH, LENGTH)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ids = random_ids(_gpt_config(*sizes), BATCH, sizes[1]).to(device)
    inputs = {"input_ids": ids, "labels": ids}
    hardware = sp_compiler.profile(device=device)

    def build(name: str) -> nn.Module:
        return MODELS[name](*sizes).to(device, dtype)

    for name in MODELS:
        yield from compare(name, partial(build, name), inputs, rounds, hardware, DEVICE_TIME)


def _gpt_config(width: int, length: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=VOCABULARY,
        num_positions=length,
        hidden_size=width,
        num_layers=LAYERS,
        num_heads=max(width // 128, 2),
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
    )


def _gpt(width: int, length: int) -> nn.Module:
    return plain_gpt(_gpt_config(width, length))


def _llama(width: int, length: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(width // 128, 2),
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[[int, int], nn.Module]] = {"GPT": _gpt, "Llama": _llama}
