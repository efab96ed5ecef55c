"""Random models of operators with rules, compiled over simulated ranks, against the models themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import parity
from tests.random_models import RandomModel, Recipe, recipes

_TOLERANCE = 1e-9
_CALM = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def check(recipe: Recipe, tp: int, sequence_parallel: bool) -> None:
    model = RandomModel(recipe).double().train()
    ids = torch.randint(0, 12, (recipe.batch, recipe.seq), generator=torch.Generator().manual_seed(1))
    found = parity.make_case(model, {"ids": ids})
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    program = parity.compiled(found, tp=tp, sequence_parallel=sequence_parallel)
    step = parity.simulate(found, program)
    torch.testing.assert_close(step.outputs[0], loss.detach(), rtol=_TOLERANCE, atol=_TOLERANCE)
    assert parity.gradient_error(step.grads, grads) < _TOLERANCE


@settings(max_examples=30, **_CALM)
@given(recipes(), st.sampled_from((2, 3, 4)), st.booleans())
def test_random_models(recipe: Recipe, tp: int, sequence_parallel: bool) -> None:
    check(recipe, tp, sequence_parallel)


@pytest.mark.slow
@settings(max_examples=600, **_CALM)
@given(recipes(16), st.sampled_from((2, 3, 4)), st.booleans())
def test_many_random_models(recipe: Recipe, tp: int, sequence_parallel: bool) -> None:
    check(recipe, tp, sequence_parallel)
