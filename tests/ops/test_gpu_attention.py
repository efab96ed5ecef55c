"""The kernels of attention that Inductor emits for a GPU, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.pretended_gpu import until_written
from sp_compiler.inductor.lowering import Traced
from sp_compiler.ops import attention as operators
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu import attention as kernels
from tests.helpers.interpreted_triton import Run, needs_triton, run_emitted

pytestmark = [needs_triton, pytest.mark.slow]
QUERIES, KEYS, WIDTH = 200, 140, 16  # the last blocks of both are partly empty


def _emitted(function: kernels.Function, given: kernels.Given, place: kernels.Place) -> str:
    from torch._inductor.decomposition import select_decomp_table

    module, fakes = kernels.trace_for(function, given, place, select_decomp_table())
    mode = fakes[0].fake_mode  # type: ignore[attr-defined]
    places = range(len(fakes))
    traced = Traced(module, mode, fakes, places, [None] * len(fakes), False, True)
    return until_written(traced, lambda graph: graph.codegen()[0].value)


@pytest.mark.parametrize(("masked", "p"), [(True, 0.3), (False, 0.0)])
def test_numbers_are_those_of_the_operators(interpreted: Run, masked: bool, p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, 2, size, WIDTH, generator=generator)
        for size in (QUERIES, KEYS, KEYS, QUERIES)
    )
    mask = torch.rand(1, 1, QUERIES, KEYS, generator=generator) > 0.9 if masked else None
    seed = torch.tensor(7) if p else None
    rest: Any = (mask, seed, 0.25, p, 3, 1, 2)
    tp = Communicator(None, 1, 2)

    exact: Any = [x.double() for x in (query, key, value)]
    context, logsumexp = operators.dropout_attention(tp, *exact, *rest)
    expected = operators.dropout_attention_backward(
        tp, grad.double(), *(*exact, context, logsumexp, *rest)
    )

    given = kernels.Given(query, key, value, mask, seed, torch.tensor(3))
    place = kernels.Place(1, 0.25, p, 1, 2, 0, 0)
    results = interpreted(run_emitted, _emitted(kernels.compute, given, place), _present(given))
    for actual, each in zip(results, (context, logsumexp), strict=True):
        torch.testing.assert_close(actual.double(), each, rtol=0, atol=1e-5)
    given = given._replace(grad=grad, context=context.float(), logsumexp=logsumexp.float())
    text = _emitted(kernels.differentiate, given, place)
    for actual, each in zip(interpreted(run_emitted, text, _present(given)), expected, strict=True):
        torch.testing.assert_close(actual.double(), each, rtol=0, atol=1e-5)


def _present(given: kernels.Given) -> list[torch.Tensor]:
    return [x for x in given if x is not None]
