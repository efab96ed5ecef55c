"""Nothing is different between a model and itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from sp_compiler.graph_diff.diff import diff
from tests.models.architecture import DIVIDING
from tests.models.architectures import build, inputs

# Bloom has autograd functions, whose numbers differ from capture to capture.
_SLOW = ("gpt2", "gemma2", "mixtral", "t5", "vit", "whisper")


@pytest.mark.parametrize(
    "name", ["bloom", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)]
)
def test_a_model_is_itself(name: str) -> None:
    model = build(name, DIVIDING)
    result = diff(model, model, example_inputs=((), inputs(name, DIVIDING)))
    assert result.is_empty


def _convolutions(*sizes: int) -> nn.Sequential:
    """Norms whose running statistics leave the layer in calls of their own, and dropouts."""
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1))
        for a, b in itertools.pairwise(sizes)
    ]
    flat = [layer for block in layers for layer in block]
    return nn.Sequential(*flat, nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.parametrize("sizes", [(3, 8, 8), (3, 8, 8, 4, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_layers_that_are_called_twice_are_themselves(
    sizes: tuple[int, ...], training: bool
) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = _convolutions(*sizes)
    model(x)
    model.train(training)
    for _ in range(3):
        result = diff(model, model, example_inputs=((x,), {}))
        assert str(result) == "no difference"
        assert result.is_empty
        assert not result.counts
