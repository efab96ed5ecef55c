"""Megatron-Core 0.16.1 itself, on CPU over gloo: TP + SP of a GPT of the plain one's size.

Megatron-Core is written for CUDA. Without a CUDA device, some of its functions are replaced here,
in this process only: the current device, the random-state tracker (dropout must be 0) and its fused
norm. Layers, parallel linears, losses and the order of collectives are its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import GPTConfig
from benchmarks.peers.parallel_functions import all_reduce
from benchmarks.peers.recompute import Recompute

VERSION = "0.16.1"
HOW_TO_INSTALL = (
    f"Megatron-Core {VERSION} is not installed and is left out; to add it: "
    "pip install -c constraints.txt -e '.[bench]'"
)
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def is_installed() -> bool:
    """Return whether Megatron-Core can be timed here."""
    try:
        return importlib.metadata.version("megatron-core") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


class PlainNorm(nn.LayerNorm):
    """A layer norm marked for Megatron-Core to reduce its gradients under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _NoTracker:
    """Replaces the CUDA random-state tracker if no random numbers are drawn."""

    @contextlib.contextmanager
    def fork(self, *_: Any) -> Iterator[None]:
        yield

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        pass


def run_on_cpu() -> None:
    """Replace the functions of Megatron-Core that need a CUDA device, in this process."""
    from megatron.core import tensor_parallel
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer import transformer_block

    tracker = _NoTracker()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    for module in (layers, random, tensor_parallel):
        module.get_cuda_rng_tracker = lambda *_, **__: tracker
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    backends.LNImpl = PlainNorm
    transformer_block.LayerNormImpl = PlainNorm


def build(config: GPTConfig, recompute: Recompute, tp: int) -> nn.Module:
    """Megatron-Core's GPT of the plain one's size, sequence-parallel over the default group.

    Raises:
        ValueError: ``config`` asks for dropout.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    if config.dropout or config.attention_dropout:
        raise ValueError("dropout > 0: Megatron-Core draws it on CUDA only")
    run_on_cpu()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, create_gloo_process_groups=False
        )
    options = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=False,
        **RECOMPUTE[recompute],
    )
    return GPTModel(
        options,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=config.vocab_size,
        max_sequence_length=config.num_positions,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )


def step(config: GPTConfig, ids: Tensor, recompute: Recompute, tp: int) -> Callable[[], Tensor]:
    """A function that runs forward and backward once and returns the loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(config, recompute, tp)
    batch, length = ids.shape
    positions = torch.arange(length).expand(batch, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    labels, weights = ids.roll(-1, 1), torch.ones(ids.shape)
    weights[:, -1] = 0.0
    partial = [p for p in model.parameters() if getattr(p, "sequence_parallel", False)]

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        losses = model(ids, positions, mask, labels=labels)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        _sum_gradients(partial)
        return loss.detach()

    return run


def _sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients of sequence-parallel parameters in one all-reduce, as Megatron does."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    group = dist.group.WORLD
    if not grads or group is None or group.size() == 1:
        return
    flat = all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
