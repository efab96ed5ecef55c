"""The Triton kernel for GPUs: interpreted here, it draws the bits of the operators, and nothing
else; compiled for a GPU, it rounds as they do."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compiler.ops import dropout as operators
from sp_compiler.ops.communicator import Communicator
from tests.helpers.interpreted_triton import Run, needs_triton

pytestmark = needs_triton

SEED = torch.tensor(-4_611_686_018_427_387_847)


def _interpreted(x: Tensor, result: Tensor, *rest: Any) -> Tensor:
    from sp_compiler.ops.gpu.dropout import run_dropout

    run_dropout(x, result, *rest)
    return result


def _both(
    interpreted: Run, x: Tensor, *place: int, p: float = 0.3, rank: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Results of the kernel and of the operators for ``x``: dropout, and its mask."""
    site, dim, world_size, *rest = place
    rest += [0] * (4 - len(rest))
    tp = Communicator(None, rank, world_size)
    given = SEED, operators.threshold_of(p), 1 / (1 - p), site, dim, world_size, rank, *rest
    for operator, result in (
        (operators.dropout, torch.empty_like(x)),
        (operators.dropout_mask, torch.empty_like(x, dtype=torch.bool)),
    ):
        yield interpreted(_interpreted, x, result, *given), operator(tp, x, SEED, p, *place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_type_to_the_bit(interpreted: Run, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    p = 0.3
    if dtype == torch.bfloat16:
        # Interpreted, numbers of this type are cut instead of rounded; the scale 2 needs neither.
        p = 0.5
    else:
        x[0, 0, :4] = torch.tensor([float("inf"), float("nan"), 0.0, -0.0])
    for actual, expected in _both(interpreted, x, 3, 0, 1, p=p):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_dropped_of_an_infinite_number_is_nan(interpreted: Run) -> None:
    (actual, expected), (_, mask) = _both(interpreted, torch.full((64,), float("inf")), 0, 0, 1)
    assert torch.equal(actual.isnan(), ~mask)
    assert torch.equal(expected.isnan(), ~mask)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (4, 0), (3, 1), (2, 1500), (5000, 2)])
def test_every_shape(interpreted: Run, shape: tuple[int, ...]) -> None:
    for actual, expected in _both(interpreted, torch.ones(shape), 0, 0, 1):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_every_rank(interpreted: Run, dim: int, padding: int) -> None:
    x = torch.ones(2, 3, 4, 6)
    masks = []
    for rank in range(3):
        for actual, expected in _both(interpreted, x, 1, dim, 3, 5, padding, rank=rank):
            assert torch.equal(actual, expected)
        masks.append(expected)
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunks_of_queries(interpreted: Run, dim: int, world_size: int) -> None:
    x = torch.ones(2, 3, 4, 8)
    for rank in range(world_size):
        for actual, expected in _both(interpreted, x, 2, dim, world_size, 0, 0, 8, 16, rank=rank):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("place", [(0, 0, 1, 1 << 40), (0, -1, 1 << 31)])
def test_places_beyond_32_bits(interpreted: Run, place: tuple[int, ...]) -> None:
    """A part of a tensor with more elements than that, or of rows with more columns."""
    for actual, expected in _both(interpreted, torch.ones(2, 64), *place, rank=(1 << 30) + 1):
        assert torch.equal(actual, expected)


def test_operators_run_it_on_a_gpu(interpreted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors here are not on one; they are made to say so."""
    x, tp, place = torch.randn(4, 6), Communicator(None, 0, 1), (SEED, 0.5, 0, 0, 1)
    expected = operators.dropout(tp, x, *place)
    calls = []

    def run(x: Tensor, result: Tensor, *rest: Any) -> None:
        calls.append(rest)
        result.copy_(interpreted(_interpreted, x, result, *rest))

    monkeypatch.setattr(operators, "_gpu_kernel", lambda: run)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for layout in (x, x.t().contiguous().t()):
        assert torch.equal(operators.dropout(tp, layout, *place), expected)
        mask = operators.dropout_mask(tp, layout, *place)
        assert torch.equal(mask, expected != 0)
        assert mask.stride() == layout.stride()
    assert len(calls) == 4


def _compiled() -> tuple[str, bytes]:
    """The assembly and the machine code for an H100, which need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget

    from sp_compiler.ops.gpu.dropout import _dropout

    names = _dropout.arg_names
    constants = {
        "SCALE": 1 / 0.9, "IS_MASK": False, "IS_WIDE": False,
        "HAS_QUERIES": True, "HAS_INNER": True, "ROWS": 4, "COLUMNS": 1024,
    }  # fmt: skip
    types = {"x": "*bf16", "result": "*bf16", "seed": "*i64", "site": "i64"}
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        _dropout,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        # What a launch finds out: addresses, and a number of columns that is a multiple of 16.
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("x", "result", "num_columns")
        },
    )
    target, options = GPUTarget("cuda", 90, 32), {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    return compiled.asm["ptx"], compiled.asm["cubin"]


@pytest.mark.slow
def test_compiled_for_a_gpu() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assembly, machine_code = pool.submit(_compiled).result()
    assert machine_code
    # Numbers of 16 bits are loaded eight at a time, and rounded to the nearest.
    assert re.search(r"ld\.global\S*\.v4\.b32", assembly)
    assert re.search(r"cvt\.rn\.bf16", assembly)
