"""Models that no library ships, on simulated ranks against eager, outputs and every gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sp_compiler.base.placement import I, Placement, S
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.verification.simulate import SimulatedStep, simulate_step
from tests.helpers.parity import SEED, gradient_error
from tests.helpers.slow import slow

_WIDTH, _HEADS, _VOCAB = 24, 4, 60
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"tp": 1},
    {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    {"tp": 3, "sequence_parallel": True, "recompute": "full"},
    {"tp": 4, "sequence_parallel": False, "recompute": "none"},
)


class Block(nn.Module):
    """A pre-norm block on its own: no other region tells its rows of tokens from its features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(core.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ComplexRotary(Block):
    """Rotary positions as a product of complex numbers."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        angle = torch.outer(torch.arange(x.shape[1]), 0.5 ** torch.arange(q.shape[-1] // 2))
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for y in (q, k)
        )
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(core.transpose(1, 2).flatten(2))


class Alibi(Block):
    """A bias that every rank computes is the sum to which an operator without rule adds."""

    def attention(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (y.flatten(0, 1) for y in self.heads(x))
        distance = torch.arange(s) - torch.arange(s)[:, None]
        slopes = 0.5 ** torch.arange(1, _HEADS + 1, dtype=x.dtype)
        bias = (slopes[:, None, None] * distance).repeat(b, 1, 1)
        scores = torch.baddbmm(bias, q, k.mT, alpha=1 / math.sqrt(q.shape[-1]))
        core = (scores.softmax(-1) @ v).unflatten(0, (b, _HEADS))
        return self.out(core.transpose(1, 2).flatten(2))


class Picked(Block):
    """Each sequence's largest token, picked by index."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x[torch.arange(x.shape[0]), x.sum(-1).argmax(-1)]


class HeadsAreRows(Block):
    """A gated norm of each head, over rows of batch, sequence and heads in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.head_norm = nn.LayerNorm(_WIDTH // _HEADS)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        rows, gate = (y.reshape(-1, y.shape[-1]) for y in (core, v.transpose(1, 2)))
        return self.out((self.head_norm(rows) * F.silu(gate)).reshape(core.shape).flatten(2))


class DimsOfOthers(nn.Module):
    """Operators whose dims are not those of their first operand, or for which -1 means "all"."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        conv = nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1, groups=4)
        self.conv = nn.utils.parametrizations.weight_norm(conv, dim=2)
        # Two of them: the backward of one without weights returns no gradients of them.
        self.batch_norms = nn.Sequential(
            nn.BatchNorm1d(_WIDTH), nn.BatchNorm1d(_WIDTH, affine=False)
        )

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        alike = F.cosine_similarity(y[0], y, dim=1), torch.linalg.vecdot(y[0], y, dim=1)
        twice = torch.cat([y.new_zeros(0), y, y], 0)
        images = self.batch_norms(self.conv(y.transpose(1, 2)))
        one_image = self.conv(y[0].T)
        return *alike, torch.diag_embed(y, dim1=0, dim2=1), twice, images, one_image


class Recurrent(nn.Module):
    """Recurrent layers have a dropout among their arguments, which is off."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, batch_first=True)
        self.gru = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.gru(self.lstm(x)[0])[0])


class NoParameters(nn.Module):
    """Nothing to shard."""

    def forward(self, x: Tensor) -> Any:
        return (x @ x.mT).softmax(-1) @ x, x.sum()


class TwoRoles(nn.Module):
    """A matrix as weight, bias and factor; a scalar output whose gradient skips the block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCAB, _WIDTH)
        self.block = Block()
        self.weight = nn.Parameter(torch.empty(_WIDTH, _WIDTH))

    def forward(self, ids: Tensor) -> Any:
        x = self.block(self.embedding(ids) @ self.weight)
        x = (x @ self.weight.t() + self.weight.diagonal()) * self.weight.mean()
        return x @ self.embedding.weight.t(), self.embedding.weight.square().sum()


class ClassesFirst(nn.Module):
    """A loss of logits whose classes are dim 1, as a 2-dimensional image's are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCAB, _WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCAB)

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.embedding(ids)).transpose(1, 2)
        return F.cross_entropy(logits, ids, label_smoothing=0.1)


class SeveralLosses(nn.Module):
    """Losses of values of different shapes, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.second(x)
        return (
            F.mse_loss(self.first(x), x)
            + F.smooth_l1_loss(y, x[..., :4])
            + F.l1_loss(y, y + x[..., 4:8])
        )


class SharedModulation(nn.Module):
    """Parts of one split, before blocks, in between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        scale, shift, gate = self.modulation(x).chunk(3, -1)
        for block in self.blocks:
            x = block(x) * scale + shift
        return x + gate


class ReturnsParameters(nn.Module):
    """One that is used too and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.unused = nn.Parameter(torch.empty(_WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.block(x), self.block.up.weight, self.unused


class Constants(Block):
    """Values that are made of no tensor, one of them written later."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        turned = torch.empty(y.shape, dtype=y.dtype)
        turned[..., ::2], turned[..., 1::2] = -y[..., 1::2], y[..., ::2]
        rows, columns = torch.triu_indices(x.shape[1], x.shape[1])
        window = torch.hann_window(_WIDTH, dtype=x.dtype) + torch.fft.fftfreq(_WIDTH)
        pairs = y[:, rows] * y[:, columns] * torch.Tensor(_WIDTH).fill_(0.5)
        return turned * window, pairs, y[:, torch.tril_indices(2, 2)[0]]


class Factorizations(Block):
    """Operators that raise for singular matrices, in forward and (of ``eig``) in backward."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        matrix = torch.eye(_WIDTH, dtype=x.dtype) + y.mT @ y
        solved = torch.linalg.solve(matrix, y.mT)
        factors, _ = torch.linalg.lu_factor(matrix)
        return (
            solved.mT + y @ torch.linalg.matrix_power(matrix, -2),
            torch.linalg.cholesky(matrix),
            torch.inverse(matrix),
            factors,
            torch.linalg.eig(matrix)[0].abs(),
        )


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    model = kind().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) + (parameter.ndim < 2))
    return model


def _input(kind: Callable[[], nn.Module], batch: int, seq: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind in (TwoRoles, ClassesFirst):
        return torch.randint(0, _VOCAB, (batch, seq), generator=generator)
    shape = (batch, seq, _WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _assert_like_eager(kind: Callable[[], nn.Module], x: Tensor, **options: Any) -> None:
    """Outputs, gradients of parameters and of the input, for random gradients of all outputs."""
    model = _model(kind)
    eager, leaf = copy.deepcopy(model), x.detach().requires_grad_(x.requires_grad)
    outputs = pytree.tree_leaves(eager(leaf))
    generator = torch.Generator().manual_seed(2)
    tangents = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outputs]
    torch.autograd.backward(outputs, tangents)
    step = _simulated(model, x, tangents, **options)
    for actual, true in zip(step.outputs, outputs, strict=True):
        torch.testing.assert_close(actual, true.detach(), rtol=1e-10, atol=1e-10)
    expected = {name: value.grad for name, value in eager.named_parameters()}
    grads = step.grads
    if x.requires_grad:
        expected, grads = {**expected, "x": leaf.grad}, {**grads, "x": step.input_grads[0]}
    assert gradient_error(grads, expected) < 1e-10


def _simulated(
    model: nn.Module, x: Tensor, tangents: list[Tensor], **options: Any
) -> SimulatedStep:
    compiled = build(model, (x,), {}, CompileOptions(outputs="replicate", **options))
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return simulate_step(compiled, params, buffers, [x], SEED, output_grads=tangents)


_KINDS = (
    Block,
    ComplexRotary,
    Alibi,
    Picked,
    HeadsAreRows,
    DimsOfOthers,
    Recurrent,
    NoParameters,
    TwoRoles,
    ClassesFirst,
    SeveralLosses,
    SharedModulation,
    ReturnsParameters,
    Constants,
    Factorizations,
)
_TAKE_LONGEST = (Recurrent, DimsOfOthers, SharedModulation)


def _in_turn() -> list[Any]:
    """Every kind in one setting in turn, and in another one as a slow test.

    Those that take longest are slow tests in both.
    """
    cases = []
    for number, kind in enumerate(_KINDS):
        first = pytest.mark.slow if kind in _TAKE_LONGEST else ()
        for place, marks in ((number, first), (number + 2, pytest.mark.slow)):
            options = _OPTIONS[place % len(_OPTIONS)]
            label = f"{kind.__name__}-tp{options['tp']}"
            cases.append(pytest.param(kind, options, id=label, marks=marks))
    return cases


@pytest.mark.parametrize(("kind", "options"), _in_turn())
def test_like_eager(kind: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    _assert_like_eager(kind, _input(kind, 2, 5), **options)


@pytest.mark.parametrize("size", [slow((3, 1)), slow((1, 7)), (1, 1)])
@pytest.mark.parametrize("kind", [Block, TwoRoles])
def test_single_tokens_and_sequences(kind: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    """A dim of size 1 is neither tokens nor features."""
    _assert_like_eager(kind, _input(kind, *size), tp=2)


@pytest.mark.parametrize("tp", [2, _HEADS])
def test_heads_as_rows_are_sharded(tp: int) -> None:
    """One head a rank: rows of heads and rows of tokens have the same shape there."""
    x = _input(HeadsAreRows, 2, 5)
    compiled = build(_model(HeadsAreRows), (x,), {}, CompileOptions(tp=tp))
    assert not compiled.notes
    for name in ("qkv.weight", "out.weight", "up.weight", "down.weight"):
        assert compiled.param_placements[name].is_sharded


@pytest.mark.parametrize("tp", [1, 2])
def test_singular_matrices_raise(tp: int) -> None:
    """As eager does, instead of returning infinities."""
    x = torch.zeros(2, _WIDTH, _WIDTH, dtype=torch.float64)
    model = Solved()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        model(x)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        _simulated(model, x, [x], tp=tp)


class Solved(nn.Module):
    """The inverse of a batch of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH, _WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x @ self.weight)


@pytest.mark.parametrize("placement", [I, S(0), S(1)])
def test_returned_parameter_stays_where_it_was_placed(placement: Placement) -> None:
    """By a compilation in which it was used."""
    model, x = _model(ReturnsParameters), _input(ReturnsParameters, 2, 5)
    compiled = build(model, (x,), {}, CompileOptions(tp=2), fixed={"unused": placement})
    assert compiled.param_placements["unused"] == placement
    params = dict(model.named_parameters())
    grads = [None, None, torch.arange(_WIDTH**2, dtype=torch.float64).view(_WIDTH, _WIDTH)]
    step = simulate_step(compiled, params, {}, [x], SEED, output_grads=grads)
    torch.testing.assert_close(step.outputs[2], params["unused"].detach(), rtol=0, atol=0)
    torch.testing.assert_close(step.grads["unused"], grads[2], rtol=0, atol=0)
