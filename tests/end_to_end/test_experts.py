"""Experts by PyTorch's grouped product, which transformers takes for bfloat16."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from sp_compiler.api import plan
from tests.helpers import parity


class _Experts(nn.Module):
    """An embedding, tokens sorted by the expert that a router picks, two products an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(32, 16), nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 64) / 4)
        self.down = nn.Parameter(torch.randn(4, 64, 16) / 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(0, 1)
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = (expert.unsqueeze(-1) == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        hidden = F.silu(torch._grouped_mm(x[order], self.up, offs=ends))
        y = torch._grouped_mm(hidden, self.down, offs=ends) * weight[order].unsqueeze(-1)
        return (y[order.argsort()] + x).square().mean()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_grouped_products_are_sharded_and_right(tp: int, sequence_parallel: bool) -> None:
    """In bfloat16, the one type that export takes: as near to one device as that type is."""
    torch.manual_seed(0)
    ids = torch.randint(32, (4, 16))
    found = parity.make_case(_Experts().bfloat16(), {"ids": ids})
    program = parity.compiled(
        found, tp=tp, sequence_parallel=sequence_parallel, hints={"up": Shard(2), "down": Shard(1)}
    )
    assert program.replicated == ()
    step = parity.simulate(found, program)
    assert parity.output_error(step, found) < 0.01
    assert parity.gradient_error(step.grads, found.grads, floor=0.1) < 0.03


@pytest.mark.slow
def test_a_model_on_meta() -> None:
    """Its capture takes the path of an accelerator, which counts integers."""
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=8, vocab_size=512, num_local_experts=8, use_cache=False,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config).bfloat16()
        ids = torch.zeros(2, 256, dtype=torch.long)
    found = plan(model, ((), {"input_ids": ids, "labels": ids}), tp=8)
    assert not any("could not be proven" in note for note in found.notes)
    assert found.replicated_parameter_bytes < 0.01 * found.parameter_bytes
    in_experts = [t for t in found.block("MixtralDecoderLayer").kept if "_grouped_mm" in t.op]
    assert [tensor.shape for tensor in in_experts] == [(1024, 2 * 1024 // 8)]
