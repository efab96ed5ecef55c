"""What is traced has the dtypes that eager code has, and what is compiled reads no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.inductor.fused import Fused
from sp_compiler.inductor.lowering import _arrangement
from sp_compiler.ops.communicator import Communicator
from tests.helpers import parity
from tests.helpers.inductor import fused, needs_compiler, own_cache
from tests.helpers.open_sizes import EXAMPLE, open_program, tokens

aten = torch.ops.aten
_X = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)) * 2 + 30

_WEIGHTS = torch.arange(8.0) + 1, torch.ones(8)

NORMS: dict[str, Any] = {
    "layer": lambda x, w: aten.native_layer_norm.default(x.mT.contiguous(), [8], *w, 1e-5),
    "group": lambda x, w: aten.native_group_norm.default(x, *w, 2, 8, 4, 2, 1e-5),
    "batch": lambda x, w: aten._native_batch_norm_legit.no_stats(x, *w, True, 0.1, 1e-5),
    "buffers": lambda x, w: aten._native_batch_norm_legit_functional.default(
        x, *w, x.new_zeros(8).float(), x.new_ones(8).float(), True, 0.1, 1e-5
    ),
}


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_norms_are_those_of_the_kernel(norm: str) -> None:
    """Of an input in bfloat16 and weights in float32, as under autocast."""
    arguments = (_X.bfloat16(), *_WEIGHTS)
    traced = fused(lambda tp, x, *w: tuple(NORMS[norm](x, w)), arguments)._traced
    assert traced is not None
    result, *statistics = traced.module(*arguments)
    expected, *exact = NORMS[norm](arguments[0], _WEIGHTS)
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(statistics, exact, rtol=1e-6, atol=0)
    assert [each.dtype for each in traced.results] == [expected.dtype, *(x.dtype for x in exact)]


def test_inputs_get_the_dtype_that_was_compiled_for() -> None:
    for traced in (torch.empty(4, 3).bfloat16(), torch.empty(3, 4).bfloat16().t()):
        arrange = _arrangement(traced)
        assert arrange is not None
        assert arrange(torch.ones(4, 3)).dtype is torch.bfloat16


@pytest.fixture
def _cache(tmp_path: Path) -> Iterator[None]:
    with own_cache(tmp_path):
        yield


@needs_compiler
@pytest.mark.usefixtures("_cache")
def test_small_values_keep_their_digits() -> None:
    """In vectors as in eager code, whose errors are relative to the result."""
    x = torch.logspace(-7, -1, 64) * torch.tensor([1.0, -1.0]).repeat(32)
    got = fused(lambda tp, x: (torch.expm1(x), torch.atanh(x)), [x])(Communicator(None, 0, 2), x)
    torch.testing.assert_close(got, (torch.expm1(x), torch.atanh(x)), rtol=1e-6, atol=0)


@needs_compiler
@pytest.mark.usefixtures("_cache")
def test_results_of_16_bits_are_rounded_in_a_chain() -> None:
    """Else values near a threshold would be on its other side, in forward and backward alike."""

    def chain(tp: Communicator, x: Tensor, y: Tensor) -> Tensor:
        return F.hardshrink(x * y, 0.3) + y

    x, y = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    ranks = Communicator(None, 0, 2)
    assert torch.equal(fused(chain, [x, y])(ranks, x, y), chain(ranks, x, y))


class _Layer(nn.Module):
    """Between norms a rank has half of the rows, whose number is no size of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def test_open_sizes_are_known_where_shapes_are_computed_from_them() -> None:
    """Inductor finds the value of a size only in a dim that is nothing but that size."""
    model = nn.Sequential(_Layer(), _Layer()).double()
    program = open_program(model, {"input": tokens(*EXAMPLE)}, tp=2, backend="inductor")
    halves = 0
    for function in (each for functions in program.kernels.values() for each in functions):
        assert function._traced is not None
        sizes: list[Any] = []
        for fake in function._traced.fakes:
            sizes += [*fake.shape, *fake.stride()] if isinstance(fake, Tensor) else [fake]
        exprs = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
        plain = {each for each in exprs if each.is_Symbol}
        assert set().union(*(each.free_symbols for each in exprs)) == plain, function.name
        halves += exprs != plain
    assert halves > 1


class _Mixed(nn.Module):
    """A norm with float32 weights of what a product under autocast returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.gelu(self.norm(self.up(x)))
        return hidden.float().square().mean()


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("as_written", ["", "forward", "backward"])
def test_statistics_pass_between_kernels_and_text(as_written: str) -> None:
    """Where the compiler fails for one of them, what it hands over is what the other reads."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    found = parity.make_case(_Mixed(), {"x": x}, lift_casts=False)
    program = parity.compiled(found, tp=1, recompute="none", backend="inductor")
    changed = []
    for code in program.codes.values():
        for name, value in vars(code).items():
            function = getattr(value, "__func__", None)
            if isinstance(function, Fused) and as_written and name.startswith(as_written):
                function.run_as_written("the compiler was killed")
                changed.append(name)
    assert bool(changed) is bool(as_written)
    step = parity.simulate(found, program)
    assert parity.gradient_error(step.grads, found.grads) < 0.03


def _part(tp: Communicator, x: Tensor, b: Tensor) -> Tensor:
    return (x.transpose(1, 2) + b.unsqueeze(-2))[..., 1::2]


def _expanded_part(tp: Communicator, x: Tensor, b: Tensor) -> Tensor:
    return (x.transpose(1, 2) + b.unsqueeze(-2))[..., :1].expand(3, 7, 8)


def _expanded(tp: Communicator, x: Tensor, b: Tensor) -> Tensor:
    return (b + 1).unsqueeze(1).expand(3, 7, 8)


@needs_compiler
@pytest.mark.parametrize("function", [_part, _expanded_part, _expanded])
def test_a_result_has_the_strides_that_its_users_expect(function: Any) -> None:
    x, b = torch.randn(3, 8, 7, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    tp = Communicator(None, 0, 2)
    kernel = fused(function, (x, b))
    result = kernel(tp, x, b)
    torch.testing.assert_close(result, function(tp, x, b), rtol=0, atol=1e-15)
    assert kernel._traced is not None
    assert result.stride() == kernel._traced.results.stride()
