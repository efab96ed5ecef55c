"""Random models of operators with rules, over simulated ranks, against the models themselves.

The placements are drawn at random too: with true costs most operators of a tiny model would run
whole, and a rule that lies only where it does not pay would never be met.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.passes.sharding import prices
from tests.helpers import parity
from tests.models.random_models import RandomModel, Recipe, recipes

_TOLERANCE = 1e-9
_CALM = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def compiled_at_random(found: parity.Case, seed: int, **options: Any) -> CompiledProgram:
    """Every strategy and every conversion that is possible has a random price."""
    drawn, possible = random.Random(seed), prices.conversion_us

    def convert(size: float, source: Placement, target: Placement, *args: Any, **kw: Any) -> Any:
        cost = possible(size, source, target, *args, **kw)
        return None if cost is None else drawn.random()

    def operate(*_: float) -> float:
        return drawn.random()

    with (
        mock.patch.object(prices, "operator_us", operate),
        mock.patch.object(prices, "conversion_us", convert),
    ):
        return parity.compiled(found, **options)


def check(recipe: Recipe, seed: int, tp: int, sequence_parallel: bool) -> None:
    model = RandomModel(recipe).double().train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (recipe.batch, recipe.seq), generator=generator)
    found = parity.make_case(model, {"ids": ids})
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    program = compiled_at_random(found, seed, tp=tp, sequence_parallel=sequence_parallel)
    step = parity.simulate(found, program)
    torch.testing.assert_close(step.outputs[0], loss.detach(), rtol=_TOLERANCE, atol=_TOLERANCE)
    assert parity.gradient_error(step.grads, grads) < _TOLERANCE


_SETTING = (st.integers(0, 1 << 16), st.sampled_from((2, 3, 4)), st.booleans())


MENDED: dict[str, Callable[[Tensor], Tensor]] = {
    "roll of the flattened tensor": lambda x: x.roll(1),
    "padding that only shifts": lambda x: F.pad(x, (0, 0, 1, -1)) + F.pad(x, (1, -1)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "split into one part": lambda x: torch.cat(x.split(8, -1)),
    "cat with an empty vector": lambda x: torch.cat([x, x.new_zeros(0)], 1),
    "marks of conjugates": lambda x: torch.fft.fft(x).conj().imag * torch.fft.ihfft(x, 14).real,
    "row of size 1": lambda x: x.sum(-1, keepdim=True).softmax(-1) * x[:, :, :1],
}


class _Between(nn.Module):
    """An operator on what is sharded by width, before and after it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.function = nn.Embedding(12, 8), function
        self.up = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self.up(self.embedding(ids))).sin().sum()


@pytest.mark.parametrize("case", MENDED)
def test_mended(case: str) -> None:
    torch.manual_seed(0)
    ids = torch.arange(8).reshape(2, 4)
    found = parity.make_case(_Between(MENDED[case]).double(), {"ids": ids})
    for seed in range(6):
        step = parity.simulate(found, compiled_at_random(found, seed, tp=2))
        assert parity.output_error(step, found) < _TOLERANCE
        assert parity.gradient_error(step.grads, found.grads) < _TOLERANCE


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class _BehindNoParameter(nn.Module):
    """Equal layers, the first of which reads what depends on no parameter."""

    def __init__(self, start: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.start = nn.ModuleList(_Frozen() for _ in range(2)), start
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.start(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return (hidden.sin() * self.head(first + x)).sum()


STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x,
    "computed from an input": lambda x: x * 1.5,
    "a constant": lambda x: torch.ones(2, 4, 8, dtype=torch.float64),
}


@pytest.mark.parametrize("start", STARTS)
def test_layers_behind_no_parameter(start: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    found = parity.make_case(_BehindNoParameter(STARTS[start]).double(), {"x": x})
    for seed in range(3):
        parity.assert_step(found, compiled_at_random(found, seed, tp=2), _TOLERANCE)


@pytest.mark.slow
@settings(_CALM, max_examples=15)
@given(recipes(), *_SETTING)
def test_random_models(recipe: Recipe, seed: int, tp: int, sequence_parallel: bool) -> None:
    check(recipe, seed, tp, sequence_parallel)


@pytest.mark.slow
@settings(_CALM, max_examples=25)
@given(recipes(16), *_SETTING)
def test_many_random_models(recipe: Recipe, seed: int, tp: int, sequence_parallel: bool) -> None:
    check(recipe, seed, tp, sequence_parallel)
