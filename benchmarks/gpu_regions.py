"""Time of each region on an accelerator, as planned with a profile of it and as measured.

Regions are large enough for the host to be ahead of the device. Run by
``python -m benchmarks.gpu --only regions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import sp_compiler
from benchmarks.gpu_clock import elapsed_ms, mark
from benchmarks.inductor_time import MODELS, random_inputs
from benchmarks.region_times import Clock, Row, compare

LAYERS, BATCH, LENGTH, WIDTH = 1, 4, 2048, 4096
DROPOUT = {"GPT": 0.1, "Llama": 0.0}
DEVICE_TIME = Clock(mark, elapsed_ms)


def regions(device: str, *, small: bool, rounds: int) -> Iterator[Row]:
    """A GPT and a Llama on one rank, in 16 bits on an accelerator."""
    width, length = (64, 32) if small else (WIDTH, LENGTH)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = {name: ids.to(device) for name, ids in random_inputs(BATCH, length).items()}
    hardware = sp_compiler.profile(device=device)

    def build(name: str) -> nn.Module:
        heads = max(width // 128, 2)
        model = MODELS[name](LAYERS, length=length, width=width, heads=heads, dropout=DROPOUT[name])
        return model.to(device, dtype)

    for name in DROPOUT:
        yield from compare(name, partial(build, name), inputs, rounds, hardware, DEVICE_TIME)
