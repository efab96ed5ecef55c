"""One of 8 ranks' part of some layers of a large model, compared with hand-written layers.

The other ranks are a fake process group: its all-gathers copy this rank's part once for each rank.
Run by ``python -m benchmarks.gpu --only slices trace``.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import sp_compiler
from benchmarks import contenders
from benchmarks.contenders import PRODUCT, Step
from benchmarks.gpu_clock import elapsed_ms, finish, mark
from benchmarks.measure import alternate, ratio
from benchmarks.models import PAPER_SETUPS, GPTConfig
from benchmarks.peers.recompute import Recompute
from tests.helpers.fake_group import fake_group
from tests.helpers.shared_programs import shared_captures

RANKS = 8
DROPOUT = 0.1
DROPOUTS = (0.0, DROPOUT)
RECOMPUTES = ("none", "selective")
PRODUCT_INDUCTOR = f"{PRODUCT}, inductor"
BY_HAND = "Megatron style TP+SP"
BY_HAND_FUSED = f"{BY_HAND}, PyTorch's attention"
EAGER = "eager, unsharded"
LAYERS = 4
"""Embeddings, loss and what the host does once a step are a small part, as in a whole model."""
# The vocabulary is small: the head would hide the layers.
_LAYER_VOCABULARY = 1024
_KERNELS_SHOWN = 25
_NAME_SHOWN = 100


@dataclass(frozen=True)
class SliceRow:
    """One contender: milliseconds of a step, of its forward and of its backward.

    Args:
        layers: how many the step has.
        ratio: its step in units of that of the first contender of the setting, which recomputes
            nothing.
        over_none: its step in units of its own that recomputes nothing.
    """

    setting: str
    layers: int
    contender: str
    recompute: str
    forward_ms: float
    backward_ms: float
    step_ms: float
    ratio: float
    over_none: float


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a step: how often it runs, its time in all calls, and its part of all time."""

    kernel: str
    calls: int
    ms: float
    part: float


def slices(device: str, *, small: bool, rounds: int) -> Iterator[SliceRow]:
    """The product, hand-written layers and unsharded ones, dropout on and off."""
    # Contenders that differ only in options share one capture: a quarter of the compile time.
    with fake_group(RANKS), _in_bits_of(device), shared_captures():
        for label, config, batch in _layers(small=small):
            ids = contenders.random_ids(config, batch, config.num_positions).to(device)
            for dropout in DROPOUTS:
                sized = replace(config, dropout=dropout, attention_dropout=dropout)
                yield from _timed(f"{label}, dropout={dropout}", _gpt_steps(sized, ids), rounds)
        yield from _timed("Llama-3-70B", _llama_steps(device, small=small), rounds)


def _layers(*, small: bool, count: int = LAYERS) -> Iterator[tuple[str, GPTConfig, int]]:
    for label in ("gpt-22b", "gpt3-175b"):
        setup = PAPER_SETUPS[label]
        config = replace(setup.model, num_layers=count, vocab_size=_LAYER_VOCABULARY)
        if small:
            config = replace(config, hidden_size=64, num_heads=8, num_positions=32)
        yield label, config, setup.micro_batch


@contextlib.contextmanager
def _in_bits_of(device: str) -> Iterator[None]:
    """Models have 16 bits on an accelerator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _gpt_steps(config: GPTConfig, ids: Tensor) -> dict[tuple[str, str], Step]:
    """By contender and recomputation."""
    steps: dict[tuple[str, str], Step] = {}
    for recompute in RECOMPUTES:
        # The peers, which lack sp_compiler's "selective", recompute the attention core.
        by_hand: Recompute = "attention" if recompute == "selective" else "none"
        steps[BY_HAND, recompute] = contenders.megatron_style(config, ids, by_hand, sp=True)
        for name, options in _products(ids).items():
            steps[name, recompute] = contenders.compiled(config, ids, recompute, RANKS, **options)
    # Attention in one kernel has nothing to recompute.
    by_kernel = contenders.megatron_style(config, ids, "none", sp=True, fused_attention=True)
    unsharded = contenders.eager(config, ids, "none")
    return {**steps, (BY_HAND_FUSED, "none"): by_kernel, (EAGER, "none"): unsharded}


def _products(ids: Tensor) -> dict[str, dict[str, Any]]:
    """Options of each contender that is compiled by this project."""
    inductor = {"backend": "inductor"}
    options: dict[str, dict[str, Any]] = {PRODUCT: {}, PRODUCT_INDUCTOR: inductor}
    if ids.is_cuda:
        recorded = {"cuda_graphs": True}
        options[f"{PRODUCT}, cuda_graphs"] = recorded
        options[f"{PRODUCT_INDUCTOR}, cuda_graphs"] = inductor | recorded
    return options


def _llama_steps(device: str, *, small: bool) -> dict[tuple[str, str], Step]:
    """Layers of Llama-3-70B, for which there are no hand-written ones."""
    sizes = (
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
        if small
        else {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    )
    config = transformers.LlamaConfig(
        vocab_size=_LAYER_VOCABULARY, num_hidden_layers=LAYERS, num_key_value_heads=8, **sizes
    )
    generator = torch.Generator().manual_seed(1)
    shape = (2, 16) if small else (1, 8192)
    ids = torch.randint(_LAYER_VOCABULARY, shape, generator=generator, device="cpu").to(device)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}

    def step(**options: Any) -> Step:
        torch.manual_seed(0)
        with torch.device(device):
            module: Any = transformers.LlamaForCausalLM(config)
        if options:
            example = ((), inputs)
            module = sp_compiler.compile(module, tp=RANKS, example_inputs=example, **options)

        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(**inputs).loss.backward()

        return run

    steps = {(EAGER, "none"): step()}
    for recompute in RECOMPUTES:
        for name, options in _products(ids).items():
            steps[name, recompute] = step(recompute=recompute, **options)
    return steps


def _timed(setting: str, steps: Mapping[tuple[str, str], Step], rounds: int) -> Iterator[SliceRow]:
    forwards: dict[str, list[float]] = {}

    def ended(name: str, step: Step) -> Step:
        def run() -> None:
            with _forward_noted(forwards.setdefault(name, [])):
                step()
            finish()

        return run

    names = {f"{name}, {recompute}": (name, recompute) for name, recompute in steps}
    times = alternate({key: ended(key, steps[pair]) for key, pair in names.items()}, rounds=rounds)
    first = next(iter(names))
    for key, (name, recompute) in names.items():
        forward = statistics.median(forwards[key][-rounds:])
        step_ms = statistics.median(times[key])
        over_none = ratio(times, key, f"{name}, none")
        yield SliceRow(
            setting, LAYERS, name, recompute, forward, step_ms - forward, step_ms,
            ratio(times, key, first), over_none,
        )  # fmt: skip


@contextlib.contextmanager
def _forward_noted(milliseconds: list[float]) -> Iterator[None]:
    """Context that notes how long a step takes until its backward begins, on the device."""
    start = mark()
    begun: list[Any] = []
    backward = Tensor.backward

    def noted(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        begun.append(mark())
        backward(loss, *args, **kwargs)

    with mock.patch.object(Tensor, "backward", noted):
        yield
    # Only the first call: a compiled module's loss calls it again.
    milliseconds.append(elapsed_ms(start, begun[0]))


def trace(device: str, *, small: bool, path: Path | None) -> Iterator[KernelRow]:
    """The kernels of a step of a 22B layer, the longest first; their trace goes to ``path``."""
    with fake_group(RANKS), _in_bits_of(device):
        _, config, batch = next(_layers(small=small, count=1))
        sized = replace(config, dropout=DROPOUT, attention_dropout=DROPOUT)
        ids = contenders.random_ids(config, batch, config.num_positions).to(device)
        step = contenders.compiled(sized, ids, "selective", RANKS)
        for _ in range(3):
            step()
        yield from _kernels(step, device, path)


def _kernels(step: Step, device: str, path: Path | None) -> Iterator[KernelRow]:
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (device != "cpu")]
    finish()
    with profile(activities=activities) as profiler:
        step()
        finish()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    # Only kernels: an operator's row repeats the time of its kernels.
    where = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    key = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    found = [each for each in profiler.key_averages() if each.device_type == where]
    found.sort(key=lambda each: -getattr(each, key))
    whole = sum(getattr(each, key) for each in found)
    for each in found[:_KERNELS_SHOWN]:
        spent = getattr(each, key)
        yield KernelRow(_short(each.key), each.count, spent / 1e3, spent / whole)


def _short(kernel: str) -> str:
    """The name without the prefix that all kernels of PyTorch share."""
    common = r"\bvoid |\(anonymous namespace\)::|at::native::|c10::|std::"
    return re.sub(common, "", kernel)[:_NAME_SHOWN]
