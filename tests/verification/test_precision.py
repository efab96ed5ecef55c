"""verify() judges complex and low-precision models: bugs above the noise floor, rounding below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from sp_compiler import VerifyReport, compiler, verify
from sp_compiler.base.placement import P
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.rewrite import RegionLowering
from sp_compiler.verification import simulate
from sp_compiler.verification.precision import NothingDropped, OtherRounding, Remembered, in_float64
from tests.helpers.slow import slow

aten = torch.ops.aten


class Complex(nn.Module):
    """Returns a complex spectrum of a sharded MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.down(F.gelu(self.up(x))).unflatten(-1, (8, 2))
        return torch.view_as_complex(pairs.contiguous()) * (1 + 2j)


class Experts(nn.Module):
    """Casts to bfloat16 itself, for the operator of grouped experts that takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.w = nn.Parameter(torch.randn(2, 16, 32) / 4)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x).flatten(0, 1)
        ends = torch.tensor([8, 16], dtype=torch.int32)
        out = torch._grouped_mm(rows.bfloat16(), self.w.bfloat16(), offs=ends)
        return self.head(out.to(x.dtype)).square().mean()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.gelu(self.up(x)))).float().square().mean()


class AlwaysDrops(nn.Module):
    """Forgets ``training=self.training``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5).square().mean()


MODELS = {
    "complex": lambda: Complex(),
    "experts": lambda: Experts(),
    "bfloat16": lambda: Mlp().bfloat16(),
    "half": lambda: Mlp().half(),
}


def _verify(name: str, **options: Any) -> VerifyReport:
    torch.manual_seed(0)
    model = MODELS[name]()
    dtype = next(model.parameters()).dtype
    return verify(model, ((torch.randn(2, 8, 16).to(dtype),), {}), **options)


@pytest.mark.parametrize("name", MODELS)
def test_right_models(name: str) -> None:
    report = _verify(name)
    assert report.ok, str(report)
    assert report.precision == "float64"
    assert report.worst < 1e-12
    for row in report.table:
        assert row.noise < 1e-12
        if row.subject == "model":  # a person sees how much rounding alone would be
            assert 1e-8 < row.rounding < (1e-5 if name == "complex" else 0.2), row


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_that_ignores_the_mode(training: bool) -> None:
    report = verify(AlwaysDrops().train(training), ((torch.randn(2, 8, 16),), {}))
    assert report.ok, str(report)


@pytest.fixture
def _unrefused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "refused_operator", lambda *_: None)


def _bad(report: VerifyReport) -> Iterator[Any]:
    assert not report.ok
    for row in report.table:
        if not row.ok:  # infinite where ranks that must agree do not
            assert row.error > 100 * row.noise
            yield row


@pytest.mark.usefixtures("_unrefused")
@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial sum that is taken for the sum."""
    original = RegionLowering._convert

    def convert(self: Any, value: Any, source: Any, target: Any) -> Any:
        if source != P or target.kind not in "IR":
            return original(self, value, source, target)
        return self.made[value][source]

    monkeypatch.setattr(RegionLowering, "_convert", convert)
    report = _verify(name, sequence_parallel=False)
    assert {row.stage for row in _bad(report)} >= {"shard", "codegen"}


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_rank_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are joined in another order than they were cut."""
    original = simulate._collective

    def swapped(func: Any, args: Any) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            x = args[0]
            parts = [x._local_tensors[rank] for rank in sorted(x._ranks)]
            joined = torch.cat(parts[::-1])
            return type(x)({rank: joined.clone() for rank in range(len(parts))})
        return original(func, args)

    monkeypatch.setattr(simulate, "_collective", swapped)
    columns = {"experts": ("inner", "head")}.get(name, ("up", "down"))  # so that there are gathers
    report = _verify(name, hints=dict.fromkeys(columns, Shard(0)))
    assert {row.stage for row in _bad(report)} >= {"shard", "codegen"}


class Attention(nn.Module):
    """In bfloat16, with casts of its own around the softmax."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()
        later = torch.ones(8, 8, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2)).float().masked_fill(later, -1e9)
        return (scores.softmax(-1).to(v.dtype) @ v).float().square().mean()


@pytest.mark.parametrize("fused", [True, slow(False)])
def test_a_wrong_mask(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Attention(fused).bfloat16()
    inputs: Any = ((torch.randn(2, 8, 16).bfloat16(),), {})
    assert verify(model, inputs).ok
    original = compiler.normalize

    def unmasked(captured: Any, dropout: Any) -> None:
        original(captured, dropout)
        for node in captured.module.graph.nodes:
            if node.target is aten.scaled_dot_product_attention.default:
                node.args, node.kwargs = node.args[:3], {}
            if node.target is aten.masked_fill.Scalar:
                node.args = (*node.args[:2], 0.0)
        captured.module.recompile()

    monkeypatch.setattr(compiler, "normalize", unmasked)
    report = verify(model, inputs)
    assert report.first_bad_pass == "normalize"
    assert list(_bad(report))


class Norms(nn.Module):
    """Norms without eps: of a module, of the function, and one without a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # the export puts this into a subgraph
            x = self.norm(x)
        x = self.linear(x) * 1e-3
        x = F.rms_norm(x, (16,), self.norm.weight)
        return torch.rms_norm(x * 1e-3, (16,)).square().mean() + x.sum()


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_the_default_eps_is_that_of_the_models_dtype(dtype: torch.dtype) -> None:
    """Beside rows this small it is a large number, and another one in float64."""
    torch.manual_seed(0)
    model, x = Norms().to(dtype), torch.randn(4, 8, 16, dtype=dtype) * 1e-3
    report = verify(model, ((x,), {}), tp=2)
    assert report.ok, str(report)
    program = compiler.build(model, (x,), {}, CompileOptions(tp=2))
    assert "1.1920928955078125e-07" in program.code


def test_an_eps_that_is_given_is_rounded_as_kernels_round_it() -> None:
    """Beside rows this small a ten-millionth of it shows in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-5), nn.Linear(16, 4))
    report = verify(model, ((torch.randn(4, 8, 16) * 1e-4,), {}), tp=2)
    assert report.ok, str(report)
    wide = verify(model.double(), ((torch.randn(4, 8, 16).double() * 1e-4,), {}), tp=2)
    assert wide.ok, str(wide)


def test_errors_of_imaginary_parts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiler.normalize

    def conjugated(captured: Any, dropout: Any) -> None:
        original(captured, dropout)
        for node in captured.module.graph.nodes:
            if node.target is aten.mul.Tensor and node.args[1] == 1 + 2j:
                node.args = (node.args[0], 1 - 2j)
        captured.module.recompile()

    monkeypatch.setattr(compiler, "normalize", conjugated)
    report = _verify("complex")
    assert report.first_bad_pass == "normalize"


def test_an_operator_without_float64_is_judged_in_its_own_dtype() -> None:
    @torch.library.custom_op("precision_test::scale", mutates_args=())
    def scale(x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return x * 2

    scale.register_fake(torch.empty_like)
    scale.register_autograd(lambda ctx, grad: grad * 2)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return scale(self.inner(x)).float().square().mean()

    torch.manual_seed(0)
    report = verify(Own().bfloat16(), ((torch.randn(2, 8, 16).bfloat16(),), {}))
    assert report.precision == "its own dtypes"
    assert report.ok, str(report)
    assert all(row.noise > 1e-4 for row in report.table if row.subject == "model")


def test_modes() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    with in_float64():
        assert (x.float() / 3).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.complex64).dtype == torch.complex128
        assert F.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    y = torch.randn(64, 64)
    with OtherRounding():
        moved = y @ y
    assert 0 < (moved - y @ y).abs().max() < 1e-4
    with NothingDropped():
        assert torch.equal(F.dropout(x, 0.5), 2 * x)


def test_what_two_graphs_have_in_common_is_computed_once() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def results(scale: float) -> tuple[Tensor, Tensor]:
        leaf = w.detach().requires_grad_()
        y = scale * (x @ leaf)
        y = F.scaled_dot_product_attention(x[None, None], x[None, None], y[None, None])
        (grad,) = torch.autograd.grad(y.sum(), leaf)
        return y, grad

    alone = results(2.0)
    with Remembered():
        first, again, other = results(2.0), results(2.0), results(4.0)
        assert torch.equal(other[1], first[1] * 2)
        # Written in place: what was computed of it before is another thing now.
        product = x @ x
        x.add_(1)
        assert not torch.equal(x @ x, product)
        # Lists and signs of zero are part of what is asked for.
        assert x.sum((0,), keepdim=True).shape != x.sum((0, 1)).shape
        assert torch.equal(torch.mul(w, -0.0).signbit(), ~torch.mul(w, 0.0).signbit())
        draws = torch.bernoulli(x.sigmoid()), torch.bernoulli(x.sigmoid())
    for each, same, true in zip(first, again, alone, strict=True):
        assert torch.equal(each, true)
        assert same.data_ptr() == each.data_ptr()
    assert not torch.equal(*draws)
