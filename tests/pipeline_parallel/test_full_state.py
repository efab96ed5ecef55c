"""The unsharded weights of all stages on rank 0: those of one device, in the model's order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks

_WORDS, _WIDTH = 11, 6  # which two ranks do not divide


class _Block(nn.Module):
    """Queries, keys and values of two heads in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.scale * self.out(mixed.transpose(1, 2).flatten(2))


class _Model(nn.Module):
    """With a tied head, and a buffer that the last stage writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Model().double()


def _ids() -> Tensor:
    return torch.randint(_WORDS, (8, 5), generator=torch.Generator().manual_seed(1))


def _train(module: Any, step: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        step(_ids())
        optimizer.step()
        optimizer.zero_grad()


def _gathered(axes: dict[str, int], schedule: str) -> dict[str, Tensor]:
    mesh = grids.mesh(**axes)
    part, parts = sp_compiler.data_shard(mesh)
    pipeline: Any = sp_compiler.pipeline(
        _model(),
        mesh=mesh,
        example_inputs=((_ids().chunk(parts)[part],), {}),
        microbatches=2,
        schedule=schedule,
    )
    _train(pipeline, lambda ids: pipeline.step(ids.chunk(parts)[part]))
    for alone in (pipeline.module.full_state_dict, lambda: pipeline.module.save_pretrained("x")):
        with pytest.raises(UnsupportedError, match=r"call state = pipeline.full_state_dict\(\)"):
            alone()
    with pytest.raises(UnsupportedError, match="a pipeline cannot be copied: it holds process gr"):
        copy.deepcopy(pipeline)
    with pytest.raises(UnsupportedError, match=r"not called like its model: step\(...\) trains"):
        pipeline(_ids())
    with pytest.raises(AttributeError, match=r"no attribute 'train': step.* pipeline.module is"):
        pipeline.train()
    assert not hasattr(pipeline, "zero_grad")
    state: dict[str, Tensor] = pipeline.full_state_dict()
    assert bool(state) == (dist.get_rank() == 0)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        ({"pp": 2, "tp": 1}, "interleaved"),
        ({"pp": 2, "tp": 2}, "1f1b"),
        ({"pp": 2, "dp_shard": 2, "tp": 1}, "zero_bubble"),
    ],
)
def test_weights_of_all_stages(axes: dict[str, int], schedule: str) -> None:
    state, *_ = run_on_ranks(4 if len(axes) > 2 or axes["tp"] > 1 else 2, _gathered, axes, schedule)
    model = _model()
    _train(model, lambda ids: model(ids).backward())
    expected = model.state_dict()
    assert list(state) == list(expected)
    assert state["head.weight"] is state["embedding.weight"]
    # Two microbatches a step.
    assert state.pop("seen") == 2 * expected.pop("seen") == 4
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)
    for name, value in _model().named_parameters():
        assert (state[name] - value).abs().max() > 1e-4, f"{name} was trained"
