"""Layouts of heads, channels and experts that models have, each sharded and right."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers the grouped product
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.shares import flops_share, parameter_share
from sp_compiler.ir.fx import placements_of
from tests.helpers import parity

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_HIDDEN, _HEADS = 32, 8


class HeadsInTheBatch(nn.Module):
    """Attention whose batch and heads are one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_HIDDEN, 3 * _HIDDEN)
        self.out = nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(x).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.reshape(3, batch * _HEADS, length, -1)
        probabilities = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        core = torch.bmm(probabilities, v).view(batch, _HEADS, length, -1)
        return self.out(core.transpose(1, 2).flatten(2))


class SlicedProjection(nn.Module):
    """Queries, keys and values of fewer heads are slices of one product, written ``x @ w.T``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(2 * _HIDDEN, _HIDDEN))
        self.out = nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        both = x @ self.qkv.T
        sizes, first, parts = (_HIDDEN, _HIDDEN // 2, _HIDDEN // 2), 0, []
        for size in sizes:
            part = both[..., first : first + size]
            parts.append(part.unflatten(-1, (-1, _HIDDEN // _HEADS)).transpose(1, 2))
            first += size
        q, k, v = parts
        core = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(core.transpose(1, 2).flatten(2))


class OddSlices(nn.Module):
    """Slices of one product that overlap, or leave a hole: no split."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_HIDDEN, 64, bias=False), nn.Linear(32, _HIDDEN)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(x)
        return self.down(F.silu(both[..., :32]) * both[..., self.start : self.start + 32])


class ConvolvedChannels(nn.Module):
    """Between two projections, a convolution over time of each channel or group of channels."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_HIDDEN, 64), nn.Linear(64, _HIDDEN)
        self.conv = nn.Conv1d(64, 64, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)
        return self.down(F.silu(mixed))


class Rotated(nn.Module):
    """Heads rotated as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        angles = torch.arange(length * 2, dtype=x.dtype).view(length, 1, 2)
        turn = torch.polar(torch.ones_like(angles), angles)
        q = torch.view_as_complex(self.q(x).view(*x.shape[:2], _HEADS, -1, 2))
        return self.out(torch.view_as_real(q * turn).flatten(2))


class Interleaved(nn.Module):
    """Gate and up projections side by side, column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_HIDDEN, 128), nn.Linear(64, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(x)
        return self.down(F.silu(both[..., ::2]) * both[..., 1::2])


class NormedOverHeads(nn.Module):
    """Queries and keys divided by their root mean square over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)
        self.v, self.out = nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)
        self.scale = nn.Parameter(torch.ones(_HIDDEN))

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        products = self.norm(self.q(x)), self.norm(self.k(x)), self.v(x)
        q, k, v = (y.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for y in products)
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(core.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of four experts per token, whose rows are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_HIDDEN, 4)
        self.up = nn.Parameter(torch.randn(4, _HIDDEN, 64) / 6)
        self.down = nn.Parameter(torch.randn(4, 64, _HIDDEN) / 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        experts, order = chosen.flatten().sort()
        ends = F.one_hot(experts, 4).sum(0).cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(F.gelu(product(rows[order // 2], self.up, ends)), self.down, ends)
        y = (y * weights.flatten()[order, None])[order.argsort()]
        return y.view(-1, 2, _HIDDEN).sum(1).view_as(x)


class EinsumAttention(nn.Module):
    """Weights of three dims, one for the heads, which also come first in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.randn(_HIDDEN, _HEADS, 4)) for _ in range(2))
        self.v = nn.Parameter(torch.randn(_HEADS, _HIDDEN, 4))
        self.out = nn.Parameter(torch.randn(_HEADS, 4, _HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (torch.einsum("btd,dhk->bthk", x, w) for w in (self.q, self.k))
        v = torch.einsum("...td,hdk->...htk", x, self.v)
        probabilities = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
        core = torch.einsum("bhts,bhsk->bthk", probabilities, v)
        return torch.einsum("bthk,hkd->btd", core, self.out)


class EinsumMLP(nn.Module):
    """Two weights, one stored as it is used and one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(_HIDDEN, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(torch.einsum("btd,df->btf", x, self.up))
        return torch.einsum("btf,df->btd", inner, self.down)


class EinsumExperts(nn.Module):
    """Tokens dispatched to places of experts, as in GShard, by weights of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(_HIDDEN, 4, 2))
        self.up = nn.Parameter(torch.randn(4, _HIDDEN, 64))
        self.down = nn.Parameter(torch.randn(4, 64, _HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("btd,dec->btec", x, self.router).softmax(1)
        rows = torch.einsum("btec,btd->ebcd", weights, x)
        inner = F.gelu(torch.einsum("ebcd,edf->ebcf", rows, self.up))
        rows = torch.einsum("ebcf,efd->ebcd", inner, self.down)
        return torch.einsum("btec,ebcd->btd", weights, rows)


class Gated(nn.Module):
    """Gate and up projections are the halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_HIDDEN, 128), nn.Linear(64, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x)))


class WeightNormed(nn.Module):
    """Weights as a direction and a length for each row, or for each column."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(_HIDDEN, 64), dim=dim)
        self.down = parametrizations.weight_norm(nn.Linear(64, _HIDDEN), dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize(
    "model", [HeadsInTheBatch, lambda: ConvolvedChannels(64), lambda: ConvolvedChannels(8), Rotated,
              Interleaved]
)  # fmt: skip
@pytest.mark.parametrize("tp", [2, 4])
def test_sharded(model: Callable[[], nn.Module], tp: int) -> None:
    found = _shared(model)
    compiled = parity.assert_parity(found, tp=tp)
    assert parameter_share(compiled) == 1.0
    assert flops_share(found.program, compiled) == pytest.approx(1.0)


@pytest.mark.parametrize("model", [HeadsInTheBatch, SlicedProjection])
@pytest.mark.parametrize(("tp", "batch"), [(2, 3), (2, 4), (4, 3)])
def test_heads_stay_apart(model: Callable[[], nn.Module], tp: int, batch: int) -> None:
    """Nothing is gathered between the projections, whether or not the ranks divide the batch."""
    compiled = parity.assert_parity(_shared(model, batch), tp=tp)
    nodes = [node for region in compiled.program.regions for node in region.module.graph.nodes]
    pairs = [placements_of(node) for node in nodes]
    assert [str(pair[0]) for pair in pairs if pair and pair[0].kind != "I"] == ["P"]


@pytest.mark.parametrize("model", [EinsumAttention, EinsumMLP, EinsumExperts, Gated])
@pytest.mark.parametrize("tp", [2, 4])
def test_one_sum_over_the_ranks(model: Callable[[], nn.Module], tp: int) -> None:
    """As where the model is written with linear layers, products and chunks."""
    found = _shared(model)
    compiled = parity.assert_parity(found, tp=tp)
    assert parameter_share(compiled) == 1.0
    assert flops_share(found.program, compiled) == pytest.approx(1.0)
    nodes = [node for region in compiled.program.regions for node in region.module.graph.nodes]
    pairs = [placements_of(node) for node in nodes]
    assert [str(pair[0]) for pair in pairs if pair and pair[0].kind != "I"] == ["P"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [2, 4])
def test_weight_norm(dim: int, tp: int) -> None:
    found = _case(WeightNormed(dim), batch=4)
    compiled = parity.assert_parity(found, tp=tp)
    assert parameter_share(compiled) == 1.0
    assert flops_share(found.program, compiled) == pytest.approx(1.0)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_mean_over_all_heads_moves_a_number_a_row(tp: int) -> None:
    compiled = parity.assert_parity(_shared(NormedOverHeads), tp=tp)
    assert parameter_share(compiled) == 1.0
    nodes = [node for region in compiled.program.regions for node in region.module.graph.nodes]
    moved = [node for node in nodes if (pair := placements_of(node)) and pair[0].kind != "I"]
    widths = [node.meta["val"].shape[-1] for node in moved]
    assert sorted(widths) == [1, 1, 1, 1, _HIDDEN]  # of queries, of keys, of the output


@pytest.mark.parametrize("start", [24, 31, 32])
@pytest.mark.parametrize("width", [64, 72])
def test_slices_that_overlap_or_leave_a_hole(start: int, width: int) -> None:
    model = OddSlices(start)
    model.up = nn.Linear(_HIDDEN, width, bias=False)
    found = _case(model)
    for tp in (2, 4, 8):
        parity.assert_parity(found, tp=tp)


def test_experts_are_sharded_and_the_router_is_not() -> None:
    found = _case(Experts())
    compiled = parity.assert_parity(found, tp=4)
    sharded = {name for name, place in compiled.param_placements.items() if place.is_sharded}
    assert {"up", "down"} <= sharded
    assert flops_share(found.program, compiled) > 0.95


def test_groups_that_do_not_divide_stay_whole() -> None:
    compiled = parity.assert_parity(_case(ConvolvedChannels(2)), tp=4)
    assert not compiled.param_placements["conv.weight"].is_sharded


def _case(model: nn.Module, batch: int = 3) -> parity.Case:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    x = torch.randn(batch, 6, _HIDDEN, generator=generator, dtype=torch.float64)
    return parity.make_case(model.double(), {"x": x})


@functools.cache
def _shared(model: Callable[[], nn.Module], batch: int = 3) -> parity.Case:
    """A model that several numbers of ranks are compared with."""
    return _case(model(), batch)


class OneExpertEach(nn.Module):
    """All experts on all tokens, weighted and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_HIDDEN, 4)
        self.up = nn.Parameter(torch.randn(4, _HIDDEN, 64))
        self.down = nn.Parameter(torch.randn(4, 64, _HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(-1).t()
        routed = rows.repeat(4, 1) * weights.reshape(-1, 1)
        product = torch.bmm(F.gelu(torch.bmm(routed.view(4, -1, _HIDDEN), self.up)), self.down)
        return product.sum(0).view_as(x)


@pytest.mark.parametrize("tp", [2, 4])
def test_as_many_experts_as_ranks(tp: int) -> None:
    """The gradient of a sum over a dim of local size 1 is not expanded at all."""
    compiled = parity.assert_parity(_shared(OneExpertEach), tp=tp)
    assert not compiled.replicated
    assert compiled.param_placements["down"].is_sharded
