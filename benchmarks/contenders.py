"""The training steps that are timed against each other, all of the same plain GPT.

A contender is a function without arguments that runs forward and backward once and leaves the
gradients complete on its rank; the optimizer is not part of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import sp_compiler
from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.peers import dtensor, megatron_core
from benchmarks.peers.megatron_style import MegatronStyleGPT
from benchmarks.peers.recompute import Recompute, checkpoint_by_hand

Step = Callable[[], object]
PRODUCT = "sp_compiler"
PRODUCT_TP = "sp_compiler TP"
"""Without sequence parallelism, as contenders whose name ends alike."""


def random_ids(config: GPTConfig, batch: int, length: int) -> Tensor:
    """(b, s) token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch, length), generator=generator, device="cpu")


def plain_gpt(config: GPTConfig, device: torch.device | str = "cpu") -> PlainGPT:
    """The model, with the same weights on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return PlainGPT(config)


def eager(config: GPTConfig, ids: Tensor, recompute: Recompute) -> Step:
    """The unmodified model on one device."""
    model = checkpoint_by_hand(plain_gpt(config, ids.device), recompute)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids)[0].backward()

    return step


def compiled(
    config: GPTConfig,
    ids: Tensor,
    recompute: str,
    tp: int,
    sp: bool = True,
    **options: Any,
) -> Step:
    """This project."""
    model = sp_compiler.compile(
        plain_gpt(config, ids.device),
        tp=tp,
        sequence_parallel=sp,
        recompute=recompute,
        **options,
        example_inputs=((ids,), {"labels": ids}),
    )

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids)[0].backward()

    return step


def megatron_style(
    config: GPTConfig, ids: Tensor, recompute: Recompute, sp: bool, *, fused_attention: bool = False
) -> Step:
    """Hand-written tensor parallelism, with or without sequence parallelism."""
    whole = plain_gpt(config, ids.device)
    with ids.device:
        model = MegatronStyleGPT(
            whole,
            world_group(),
            sequence_parallel=sp,
            recompute=recompute,
            fused_attention=fused_attention,
        )

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, ids).backward()
        model.finish_gradients()

    return step


def with_dtensor(config: GPTConfig, ids: Tensor, recompute: Recompute, sp: bool) -> Step:
    """DTensor's ``parallelize_module``."""
    model = dtensor.parallelize(
        plain_gpt(replace(config, fused_qkv=False)),
        world_group(),
        sequence_parallel=sp,
        recompute=recompute,
    )

    def step() -> None:
        model.zero_grad(set_to_none=True)
        dtensor.train_step(model, ids, ids)

    return step


def tensor_parallel(config: GPTConfig, ids: Tensor, ours: str, tp: int) -> dict[str, Step]:
    """Every contender that runs on the default group, sp_compiler with both layouts first.

    The peers use the recompute setting of ``ours``; instead of "selective", which they lack, they
    recompute attention.
    """
    recompute: Recompute = "attention" if ours == "selective" else cast(Recompute, ours)
    steps = {
        PRODUCT: compiled(config, ids, ours, tp),
        PRODUCT_TP: compiled(config, ids, ours, tp, sp=False),
        "Megatron style TP": megatron_style(config, ids, recompute, sp=False),
        "Megatron style TP+SP": megatron_style(config, ids, recompute, sp=True),
        "DTensor TP": with_dtensor(config, ids, recompute, sp=False),
        "DTensor TP+SP": with_dtensor(config, ids, recompute, sp=True),
    }
    if megatron_core.is_installed():
        steps["Megatron-Core TP+SP"] = megatron_core.step(config, ids, recompute, tp)
    return steps


def world_group() -> ProcessGroup:
    """The default process group.

    Raises:
        RuntimeError: there is none.
    """
    group = torch.distributed.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    return group
