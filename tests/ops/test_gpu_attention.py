"""The kernels of attention that Inductor emits for a GPU, interpreted."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from benchmarks.pretended_gpu import until_written
from sp_compiler.inductor.lowering import Traced
from sp_compiler.ops import attention as operators
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu import attention as kernels
from tests.helpers.interpreted_triton import Run, needs_triton, run_emitted

pytestmark = [needs_triton, pytest.mark.slow]
QUERIES, KEYS, WIDTH = 140, 70, 16  # the last blocks of both are partly empty


def _emitted(function: kernels.Function, given: kernels.Given, place: kernels.Place) -> str:
    module, fakes = kernels.trace_for(function, given, place)
    mode = fakes[0].fake_mode  # type: ignore[attr-defined]
    places = range(len(fakes))
    traced = Traced(module, mode, fakes, places, [None] * len(fakes), False, True)
    return until_written(
        traced,
        lambda graph: graph.codegen()[0].value,
        lambda on_gpu: kernels.compile_graph(on_gpu.module, on_gpu.fakes),
    )


@pytest.mark.parametrize(
    ("masked", "p", "tiled"), [(True, 0.3, False), (False, 0.0, False), (True, 0.3, True)]
)
def test_numbers_are_those_of_the_operators(
    interpreted: Run, monkeypatch: pytest.MonkeyPatch, masked: bool, p: float, tiled: bool
) -> None:
    """Also with the blocks of scores that an H100 is given."""
    if tiled:
        monkeypatch.setattr(kernels, "_options", lambda given: kernels._TILED_OPTIONS)
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
    text = _emitted(kernels.compute, given, place)
    assert not tiled or _blocks(text) == {"BLOCK_M": 64, "BLOCK_N": 64}
    results = interpreted(run_emitted, text, _present(given))
    for actual, each in zip(results, (context, logsumexp), strict=True):
        torch.testing.assert_close(actual.double(), each, rtol=0, atol=1e-5)
    given = given._replace(grad=grad, context=context.float(), logsumexp=logsumexp.float())
    text = _emitted(kernels.differentiate, given, place)
    backward = {"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}
    assert not tiled or _blocks(text) == backward
    for actual, each in zip(interpreted(run_emitted, text, _present(given)), expected, strict=True):
        torch.testing.assert_close(actual.double(), each, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads_of_mask", [None, 16])
def test_kernels_find_numbers_of_a_head_behind_those_of_another(heads_of_mask: int | None) -> None:
    """They compute where a head begins from the number of its rows, or of its blocks."""
    queries, keys, heads = 1100, 130, 16
    mask = None
    if heads_of_mask is not None:
        mask = torch.ones(2, heads_of_mask, queries, keys, dtype=torch.bool)
    text = _emitted(kernels.differentiate, *_of_backward(2, heads, queries, keys, mask))
    made = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\), \(([\d, ]+)\)", text)
    assert len(made) > 10
    for each in made:
        shape, strides = ([int(x) for x in part.split(",") if x.strip()] for part in each)
        is_empty = 0 in shape
        steps = zip(shape, strides, strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        assert is_empty or last + 1 == torch.Size(shape).numel(), each


class _Factor(NamedTuple):
    shape: tuple[int, ...] = (2, 3, 256, 96)
    is_cuda: bool = True
    bits: int = 16
    device: str = "cuda"

    def element_size(self) -> int:
        return self.bits // 8


def test_blocks_of_scores_are_chosen_where_they_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = 9, 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def is_tiled(query: _Factor, value: _Factor | None = None, seed: Any = 1) -> bool:
        given: Any = kernels.Given(query, query, value or query, None, seed, None)  # type: ignore[arg-type]
        return kernels._options(given) is kernels._TILED_OPTIONS

    assert is_tiled(_Factor())
    assert not is_tiled(_Factor(), seed=None)
    assert not is_tiled(_Factor(bits=32))
    assert not is_tiled(_Factor(is_cuda=False))
    assert not is_tiled(_Factor((2, 3, 256, 160)))
    assert not is_tiled(_Factor((2, 3, 256, 32)))
    assert not is_tiled(_Factor(), _Factor((2, 3, 256, 160)))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not is_tiled(_Factor())
    monkeypatch.setattr(torch.version, "hip", None)
    capability = 8, 0
    assert not is_tiled(_Factor())


def test_arguments_that_are_one_tensor_are_read_as_several() -> None:
    """What is compiled serves calls where they are not."""
    x = torch.randn(1, 1, 128, WIDTH)
    given = kernels.Given(x, x, x, None, None, torch.tensor(3))
    module, fakes = kernels.trace_for(kernels.compute, given, kernels.Place(0, 0.25, 0, 0, 1, 0, 0))
    assert len({id(fake) for fake in fakes}) == 4
    (node,) = module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention
    )
    assert list(node.args[:3]) == module.graph.find_nodes(op="placeholder")[:3]


def test_torch_is_given_a_gradient_of_each_result() -> None:
    """Torch 2.11 multiplies that of the logsumexp, whether there is one or not."""
    given, place = _of_backward(1, 1, 128, 128, None)
    module, _ = kernels.trace_for(kernels.differentiate, given._replace(seed=None), place)
    (node,) = module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention_backward
    )
    assert all(isinstance(factor, Node) for factor in node.args[:7])


def test_a_mask_of_more_than_32_bits_of_elements_is_read_with_64() -> None:
    size = 50_000
    mask = torch.empty(1, 1, size, size, dtype=torch.bool, device="meta")
    text = _emitted(kernels.differentiate, *_of_backward(1, 1, size, size, mask))
    loads = re.findall(rf"in_ptr\d+ \+ (tmp\d+) \+ {size}\*(tmp\d+)\)", text)
    assert loads
    for number in (number for load in loads for number in load):
        assert re.search(rf"\b{number} = tmp\d+\.to\(tl\.int64\)", text), number


def test_a_precision_by_either_setting_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once torch is told one by the newer setting, its older function raises an error."""
    compilations: list[str] = []

    def compile_for(*args: Any) -> Any:
        compilations.append(torch.backends.cuda.matmul.fp32_precision)
        return lambda *tensors: [tensors[0], tensors[0][..., 0]]

    monkeypatch.setattr(kernels, "compile_for", compile_for)
    x = torch.randn(1, 1, 128, WIDTH)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert kernels.forward(0, (x, x, x, None, None), 0.125, 0.0, 0, 0, 1, 0, 0) is not None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert compilations == ["ieee", "tf32"]


def _blocks(text: str) -> dict[str, int]:
    """Sides of the blocks of scores of all kernels in a text."""
    found = set(re.findall(r"\b(BLOCK_[MN]\d?) : tl.constexpr = (\d+)", text))
    assert len(found) == len({side for side, _ in found})
    return {side: int(size) for side, size in found}


def _of_backward(
    samples: int, heads: int, queries: int, keys: int, mask: Tensor | None
) -> tuple[kernels.Given, kernels.Place]:
    rows, columns = (
        torch.zeros(samples, heads, size, WIDTH, dtype=torch.float16) for size in (queries, keys)
    )
    made = rows, rows, torch.zeros(samples, heads, queries)
    given = kernels.Given(rows, columns, columns, mask, torch.tensor(7), torch.tensor(3), *made)
    return given, kernels.Place(0, 0.25, 0.1, 1, 1, 0, 0)


def _present(given: kernels.Given) -> list[Tensor]:
    return [x for x in given if x is not None]
