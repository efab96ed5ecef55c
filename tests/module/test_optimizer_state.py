"""State that an optimizer has before the first call places the parameters, on one rank of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sp_compiler
from sp_compiler.module.parameters import optimizers_of
from tests.helpers.fake_group import fake_group

_Made = Callable[[Any], torch.optim.Optimizer]


class _Fused(nn.Module):
    """Queries, keys and values in one weight, whose parts a rank holds in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))  # of the shape of a count of steps

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return (self.scale * self.out(mixed.transpose(1, 2).flatten(2))).square().mean()


def _loaded(module: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    generator = torch.Generator().manual_seed(0)
    state = {
        index: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape, generator=generator),
            "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
        }
        for index, parameter in enumerate(module.parameters())
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return optimizer


def _made_with_sums(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.5)


def _stepped(module: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    for parameter in module.parameters():
        # Given, for a backward of torch 2.11 replicates gradients of what is cut in segments.
        parameter.grad = 2 * parameter.detach()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _after_first_call(make: _Made, *, first: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = sp_compiler.compile(_Fused(), tp=2)
    x = torch.ones(2, 4, 8)
    if first:
        module(x)
    optimizer = make(module)
    return module(x), optimizer


@pytest.mark.parametrize("make", [_loaded, _made_with_sums, _stepped])
def test_is_placed_with_the_parameters(make: _Made) -> None:
    with fake_group(2, rank=1):
        _, late = _after_first_call(make, first=True)
        loss, early = _after_first_call(make, first=False)
        cut = 0
        for one, other in zip(early.state.values(), late.state.values(), strict=True):
            for name, value in one.items():
                if not isinstance(value, DTensor):
                    continue
                assert name != "step"
                assert value.placements == other[name].placements, name
                torch.testing.assert_close(value.to_local(), other[name].to_local())
                cut += value.to_local().shape != value.shape
        assert cut >= 2
        loss.backward()
        early.step()


def test_lbfgs_makes_the_first_call_inside_of_its_step() -> None:
    module: Any = sp_compiler.compile(_Fused(), tp=1)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(2, 4, 8))
        loss.backward()
        return loss

    before = optimizer.step(closure)
    assert closure() < before
    assert optimizers_of(module.parameters()) == [optimizer]
