"""Nothing is different between a model and itself."""

from __future__ import annotations

import pytest

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
