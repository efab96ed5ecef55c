"""Experts divided over ranks with different batches: what is sent, what is refused, numbers.

The numbers are those of one device, on ranks that are threads. Public implementations have had
right losses with wrong gradients here; each such bug has its test.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.captured import Captured
from sp_compiler.passes.expert_parallel import expert_parallel
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers import expert_models, expert_ranks
from tests.helpers.expert_models import EXPERTS, HIDDEN, WIDTH, Grouped, Picked, product

_TOLERANCE = 1e-12


class AllOfThem(Grouped):
    """Every expert on every row."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.einsum("tk,ekn->etn", x, self.up)
        y = torch.einsum("etn,enk->tek", F.gelu(y), self.down)
        return (y.gather(1, chosen[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


class PickedTogether(Grouped):
    """The matrices of all choices of a token by one lookup, with ids of two dims."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = F.gelu(torch.einsum("tk,tckn->tcn", x, self.up[chosen]))
        y = torch.einsum("tcn,tcnk->tck", y, self.down[chosen])
        return (y * weights[..., None]).sum(1)


class Mixing(Grouped):
    """Rows see each other between the products."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, order = chosen.flatten().sort()
        ends = F.one_hot(ids, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        y = product(x[order // 2], self.up, ends)
        y = product(y - y.mean(0), self.down, ends) * weights.flatten()[order, None]
        return y[order.argsort()].view(*chosen.shape, -1).sum(1)


class Unusual(Grouped):
    """Weights of all rows between and behind the products, slices of experts' weights, a factor
    that is chosen before rows are sorted, and one that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // 2)
        self.factor = nn.Parameter(torch.randn(HIDDEN))
        self.scale = nn.Parameter(torch.randn(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids = chosen.flatten()
        rows, order = x[ids.argsort() // 2], ids.argsort()
        counts = torch.histc(ids.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate = product(rows, self.up[..., : WIDTH // 2], ends)
        y = F.gelu(gate) * self.norm(product(rows, self.up[..., WIDTH // 2 :], ends))
        y = product(y, self.down[:, : WIDTH // 2], ends) * self.factor * x.std()
        y = y * (weights.flatten() * self.scale[ids])[order, None]
        return y[order.argsort()].view(*chosen.shape, -1).sum(1)


class Normed(Picked):
    """A row of zeros has no norm."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, rows = chosen.flatten(), x.repeat_interleave(2, 0)
        y = torch.bmm(rows.unsqueeze(1), self.up[ids])
        y = torch.bmm(y / y.norm(dim=-1, keepdim=True), self.down[ids]).squeeze(1)
        return (y * weights.flatten()[:, None]).view(*chosen.shape, -1).sum(1)


class Selected(Picked):
    """Picks by ``index_select``."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, rows = chosen.flatten(), x.repeat_interleave(2, 0)
        y = F.gelu(torch.bmm(rows.unsqueeze(1), self.up.index_select(0, ids)))
        y = torch.bmm(y, torch.index_select(self.down, -3, ids)).squeeze(1)
        return (y * weights.flatten()[:, None]).view(*chosen.shape, -1).sum(1)


class OfBatch(Picked):
    """Between the products, a row is scaled by all of its batch."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, rows = chosen.flatten(), x.repeat_interleave(2, 0)
        y = torch.bmm(rows.unsqueeze(1), self.up[ids]) * x.std()
        y = torch.bmm(y, self.down[ids]).squeeze(1) * weights.flatten()[:, None]
        return y.view(*chosen.shape, -1).sum(1)


class OtherReader(Picked):
    """A penalty on the weights reads all experts."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights) + self.up.square().mean()


class Dense(nn.Module):
    """Experts in name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.up(x) * weights.sum(-1, keepdim=True)


class WithTable(Grouped):
    """Also adds a vector for the first choice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights) + self.table[chosen[:, 0]]


def _captured(make: Callable[[], nn.Module]) -> Captured:
    captured = capture(expert_models.model(make), (), expert_models.batches(1)[0])
    normalize(captured)
    return captured


def _divided(make: Callable[[], nn.Module], num_ranks: int = 2) -> tuple[Captured, PassReport]:
    captured = _captured(make)
    with reporting(PassReport(Pass.EXPERT_PARALLEL)) as report:
        expert_parallel(captured, num_ranks)
    return captured, report


def _worst(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    # Not Python's max, which may skip a NaN.
    largest = torch.stack([value.abs().max() for value in true.values()]).max()
    worst = torch.stack([(found[n] - value).abs().max() for n, value in true.items()]).max()
    return (worst / largest).item()


@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [
        (Grouped, 2),
        (lambda: Grouped(bias=True), 2),
        (Picked, 2),
        (Picked, 4),
        (Unusual, 2),
        (Normed, 2),
        (Selected, 2),
    ],
    ids=["grouped", "biases", "picked", "picked-4", "unusual", "normed", "selected"],
)
@pytest.mark.usefixtures("undefined_rest")
def test_gradients_are_those_of_one_device(make: Callable[[], nn.Module], num_ranks: int) -> None:
    """Of the experts, of the router and of what is below, whose rows went to other ranks.

    transformers#48687 (the router's gradient took rows that nobody had sent), transformers#48205
    (its partial sums were never summed, and NaN where a product left rows as it found them).
    """
    model, batches = expert_models.model(make), expert_models.batches(num_ranks)
    program = expert_ranks.compiled(model, batches[0], num_ranks)
    losses, grads = expert_ranks.step(program, model, batches)
    true_losses, true_grads = expert_ranks.truth(model, batches)
    torch.testing.assert_close(losses, true_losses, rtol=_TOLERANCE, atol=_TOLERANCE)
    assert _worst(grads, true_grads) < _TOLERANCE
    # NeMo-Automodel#2995: a router that is detached has a right loss too.
    assert all(true_grads[f"layers.{i}.router.weight"].abs().max() > 1e-3 for i in range(2))


@pytest.fixture
def undefined_rest() -> Iterator[None]:
    """Grouped products leave NaN behind the last row, as kernels of GPUs may."""

    def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        result = x.new_full((x.shape[0], weight.shape[2]), math.nan)
        for expert, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            result[start:end] = x[start:end] @ weight[expert]
        return result

    def backward(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_weight = torch.zeros_like(weight)
        for expert, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            of_weight[expert] = x[start:end].t() @ grad[start:end]
        return product(grad, weight.transpose(1, 2), ends), of_weight

    with torch.library._scoped_library("transformers", "IMPL") as library:
        library.impl("grouped_mm_fallback", product, "CPU")
        library.impl("grouped_mm_fallback_backward", backward, "CPU")
        yield


def test_a_route_that_is_cut_has_a_right_loss_and_a_wrong_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison above notices what a comparison of losses does not."""
    model, batches = expert_models.model(Picked), expert_models.batches(2)
    program = expert_ranks.compiled(model, batches[0], 2)
    sent = expert_ranks.ThreadRanks.exchange

    def lossy(self: Any, rows: Tensor, *counts: Any) -> Tensor:
        arrived = sent(self, rows, *counts)
        # What comes in backward from the other rank is lost.
        return arrived if torch._C._current_graph_task_id() < 0 else arrived * 0.5

    monkeypatch.setattr(expert_ranks.ThreadRanks, "exchange", lossy)
    losses, grads = expert_ranks.step(program, model, batches)
    true_losses, true_grads = expert_ranks.truth(model, batches)
    torch.testing.assert_close(losses, true_losses, rtol=_TOLERANCE, atol=_TOLERANCE)
    assert _worst(grads, true_grads) > 1e-3


def _lines(captured: Captured) -> list[str]:
    """A line for each call of the experts: name, operator, operands, shape."""
    found = []
    for node in captured.module.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if node.op == "call_function" and any("layers.0.experts" in e[0] for e in stack.values()):
            value = node.meta["val"]
            shape = list(value.shape) if isinstance(value, Tensor) else []
            name = str(node.target.__name__).partition(".")[0]
            found.append(
                re.sub(r"p_layers_0_experts_", "", f"{node.name} = {name}{node.args} {shape}")
            )
    return found


def test_rows_are_sent_around_what_reads_the_experts() -> None:
    """The bias behind the last product goes along; the router's weights come behind."""
    captured, report = _divided(lambda: Grouped(bias=True))
    lines = _lines(captured)
    begin = lines.index("expert_routes = expert_routes(cumsum, 24, 2) []")
    assert lines[begin:] == [
        "expert_routes = expert_routes(cumsum, 24, 2) []",
        "getitem_12 = getitem(expert_routes, 4) [2]",
        "getitem_11 = getitem(expert_routes, 3) [48]",
        "clamp = clamp(getitem_11, 0) [48]",
        "getitem_10 = getitem(expert_routes, 2) [48]",
        "getitem_9 = getitem(expert_routes, 1) [0]",
        "getitem_8 = getitem(expert_routes, 0) [2, 2]",
        "floor_divide = floor_divide(getitem_3, 2) [24]",
        "index = index(view_2, [floor_divide]) [24, 6]",
        "expert_dispatch = expert_dispatch(index, getitem_8, getitem_9, getitem_10, 2) [48, 6]",
        "grouped_mm_fallback = grouped_mm_fallback(expert_dispatch, up, getitem_12) [48, 12]",
        "index_1 = index(up_bias, [clamp]) [48, 12]",
        "ge = ge(getitem_11, 0) [48]",
        "reshape = reshape(ge, [48, 1]) [48, 1]",
        "where = where(reshape, index_1, 0) [48, 12]",
        "add = add(grouped_mm_fallback, where) [48, 12]",
        "gelu = gelu(add,) [48, 12]",
        "grouped_mm_fallback_1 = grouped_mm_fallback(gelu, down, getitem_12) [48, 6]",
        "index_2 = index(down_bias, [clamp]) [48, 6]",
        "ge_1 = ge(getitem_11, 0) [48]",
        "reshape_1 = reshape(ge_1, [48, 1]) [48, 1]",
        "where_1 = where(reshape_1, index_2, 0) [48, 6]",
        "add_1 = add(grouped_mm_fallback_1, where_1) [48, 6]",
        "expert_combine = expert_combine(add_1, getitem_8, getitem_9, getitem_10, 2) [24, 6]",
        "view_4 = reshape(getitem, [24]) [24]",
        "unsqueeze = unsqueeze(view_4, -1) [24, 1]",
        "index_3 = index(unsqueeze, [getitem_3]) [24, 1]",
        "mul = mul(expert_combine, index_3) [24, 6]",
        "argsort = argsort(getitem_3,) [24]",
        "index_4 = index(mul, [argsort]) [24, 6]",
        "view = reshape(index_4, [12, 2, 6]) [12, 2, 6]",
        "sum_1 = sum(view, [-2]) [12, 6]",
    ]
    assert report.kinds["layer of experts"] == 2
    assert captured.experts == tuple(
        f"layers.{layer}.experts.{name}"
        for layer in range(2)
        for name in ("up", "down", "up_bias", "down_bias")
    )
    assert all("val" in node.meta for node in captured.module.graph.nodes if node.op != "output")


@pytest.mark.parametrize(
    ("make", "num_ranks", "error", "reason"),
    [
        (
            AllOfThem,
            2,
            UnsupportedError,
            r"module 'layers.0.experts' have an unsupported form.*ekn->etn\", x, self.up\)",
        ),
        (Dense, 2, UnsupportedError, "'layers.0.experts.up' have an unsupported form"),
        (
            PickedTogether,
            2,
            UnsupportedError,
            r"unsupported form.*as w\[ids\] with ids of one dim.*self.up\[chosen\]\)",
        ),
        (Mixing, 2, UnsupportedError, "each row only from that row.*layers.0.exp"),
        (
            OfBatch,
            2,
            UnsupportedError,
            "mul, .* only from that row and parameters.*layers.0.experts",
        ),
        (OtherReader, 2, UnsupportedError, "'layers.0.experts.up' cannot be divided.*reads all"),
        (Picked, 3, ArgumentError, "4 experts of .*'layers.0.experts.up' are not div.*choose"),
    ],
)
def test_what_is_refused(
    make: Callable[[], nn.Module], num_ranks: int, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=f"(?s){reason}"):
        _divided(make, num_ranks)


class _Projected(nn.Module):
    """All matrices of a parameter of the model itself on every row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bh,ehk->bek", x, self.up)


def test_all_matrices_in_one_product_are_experts_too() -> None:
    captured = capture(_Projected(), (torch.zeros(2, 4),), {})
    normalize(captured)
    with pytest.raises(UnsupportedError, match="of parameter 'up' have an unsupported form"):
        expert_parallel(captured, 2)


class _Frames(nn.Module):
    """Parameters of three dims that are no experts: filters, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.positions = nn.Parameter(torch.zeros(2, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) + self.positions
        return y


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: nn.Linear(4, 4), (2, 4)), (_Frames, (2, 4, 5))]
)
def test_a_model_without_experts_is_refused(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    captured = capture(make(), (torch.zeros(shape),), {})
    normalize(captured)
    with pytest.raises(UnsupportedError, match="the model has no experts: leave the axis out"):
        expert_parallel(captured, 2)


def test_experts_that_are_stored_whole_are_not_divided() -> None:
    """Of a block that no call reached before the parameters were sharded."""
    stored = frozenset(("layers.0.experts.up", "layers.0.experts.down"))
    captured = _captured(Picked)
    expert_parallel(captured, 2, stored)
    assert {*captured.experts} == stored
    sizes = {
        ref.name: node.meta["val"].shape[0]
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if "experts" in ref.name
    }
    assert sizes == {name: 2 if name in stored else EXPERTS for name in sizes}
    with pytest.raises(
        UnsupportedError, match=r"'layers.0.experts.up' is whole .*needs it divided"
    ):
        expert_parallel(_captured(Picked), 2, frozenset(("layers.0.experts.down",)))
    with pytest.raises(UnsupportedError, match=r"'tokens.weight' is divided .*needs it whole"):
        expert_parallel(_captured(Picked), 2, stored | {"tokens.weight"})


def test_lookups_by_token_are_no_experts() -> None:
    """``w[ids]`` of a table whose rows are vectors stays, beside experts too."""
    captured, _ = _divided(WithTable)
    assert not any("table" in name for name in captured.experts)
    table = next(node for node in captured.placeholders if "table" in node.name)
    assert list(table.meta["val"].shape) == [EXPERTS, HIDDEN]
