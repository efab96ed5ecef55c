"""Fused attention: masks that are constant, and the explicit core."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.ir.fx import arguments, calls
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers.normalized import body, normalized, outputs, randn
from tests.models import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten
sp = torch.ops.sp_compiler


def _bool_mask(rows: int, columns: int) -> Tensor:
    """A random mask, with one row that forbids everything."""
    mask = randn(rows, columns) > -0.5
    mask[1] = False
    return mask


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "bool": {"attn_mask": _bool_mask(6, 6)},
    "float": {"attn_mask": randn(2, 1, 6, 6)},
    "float, a row forbidden": {
        "attn_mask": randn(2, 1, 6, 6, grad=True).masked_fill(~_bool_mask(6, 6), -math.inf)
    },
    "grouped": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_explicit_attention_computes_what_the_fused_one_does(case: str) -> None:
    options = dict(ATTENTION[case])
    mask = options.pop("attn_mask", None)
    kv_heads = 2 if case == "grouped" else 4
    tensors = [randn(2, heads, 6, 8, grad=True) for heads in (4, kv_heads, kv_heads)]
    tensors[2] = (tensors[2].detach() * 2 + 1).requires_grad_()
    args = [*tensors, *([mask] if mask is not None else [])]

    def attention(*args: Tensor, p: float = 0.5) -> Tensor:
        query, key, value, *given = args
        allowed = given[0] if given else None
        return F.scaled_dot_product_attention(query, key, value, allowed, p, **options)

    captured = normalized(attention, *args)
    graph = captured.module.graph
    assert not list(calls(graph, aten.scaled_dot_product_attention.default))
    (dropout,) = calls(graph, sp.dropout.default)
    assert dropout.meta["val"].shape == (2, 4, 6, 6)
    dropout.replace_all_uses_with(dropout.args[0])
    captured.module.recompile()
    (result,) = outputs(captured, *args)
    expected = attention(*args, p=0.0)
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
    gradient = randn(*expected.shape)
    wanted = torch.autograd.grad(expected, tensors, gradient)
    got = torch.autograd.grad(result, tensors, gradient)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_scores_beyond_the_largest_number_of_float16() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=1e-7)

    # 64 x 40 x 40 is beyond 65504, an eighth of it is not.
    tensors = [torch.full((1, 2, 6, 64), 40.0), torch.full((1, 2, 6, 64), 40.0)]
    tensors[1][:, :, 3:] = -40.0
    args = [*(x.half().requires_grad_() for x in tensors), randn(1, 2, 6, 64, grad=True).half()]
    captured = normalized(attention, *args)
    (result,) = outputs(captured, *args)
    query, key, value = args
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), args[:2]))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_overflowing_scores_of_a_row_that_is_forbidden(kind: torch.dtype) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=1e-7)

    tensors = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    tensors[0][:, :, 1] = 1e34  # times the keys: beyond the largest number of float32
    tensors[1][:, :, 2] = 1e5
    mask = _bool_mask(6, 6)
    if kind is not torch.bool:
        mask = torch.zeros(6, 6).masked_fill(~mask, -math.inf)
    args = [*(x.requires_grad_() for x in tensors), mask]
    (result,) = outputs(normalized(attention, *args), *args)
    assert result[:, :, 1].count_nonzero() == 0
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), args[:3]))


@pytest.mark.parametrize(
    ("mask", "examines"), [(randn(6, 6), aten.all.dim), (_bool_mask(6, 6), aten.any.dim)]
)
def test_a_mask_is_examined_once_for_all_layers_outside_of_them(
    mask: Tensor, examines: Any
) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, mask, 0.5)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, mask)
            return x

    captured = capture(Model(), (randn(2, 3, 6, 4), mask), {})
    normalize(captured)
    graph = captured.module.graph
    (rows,) = calls(graph, examines)
    if mask.dtype is torch.bool:
        (rows,) = rows.users  # its negation
    assert len(rows.users) == 5  # the mask without them, and in each layer queries and context
    for softmax in calls(graph, aten.softmax.int):
        (dropped,) = softmax.users  # no other pass over the probabilities
        assert dropped.target is sp.dropout.default
    assert "nn_module_stack" not in rows.meta


def _with_mask(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, make(x))


def _causal(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[-2])
    return (positions[None] <= positions[:, None]).expand(x.shape[0], 1, -1, -1)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (_causal, "None, 0.0, True"),
        (lambda x: torch.ones(6, 6, dtype=torch.bool), "None, 0.0, False"),
        (lambda x: torch.zeros(6, 6, dtype=x.dtype), "None, 0.0, False"),
        (lambda x: x.new_full((6, 6), -math.inf).triu(1), "None, 0.0, True"),
    ],
)
def test_known_masks_are_folded(make: Callable[[Tensor], Tensor], arguments: str) -> None:
    x = randn(2, 3, 6, 4)
    captured = normalized(_with_mask(make), x)
    assert body(captured) == [
        f"%1 = aten.scaled_dot_product_attention(%0, %0, %0, {arguments}) : f64[2, 3, 6, 4]",
        "output(%1)",
    ]
    expected = _with_mask(make)(x)
    torch.testing.assert_close(outputs(captured, x)[0], expected, rtol=1e-13, atol=1e-13)


def test_a_scale_of_zero_stays() -> None:
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, _causal(x), scale=0.0)

    x = randn(2, 3, 6, 4)
    captured = normalized(attention, x)
    (call,) = calls(captured.module.graph, aten.scaled_dot_product_attention.default)
    assert not arguments(call)["is_causal"]
    torch.testing.assert_close(outputs(captured, x)[0], attention(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: _causal(x) & (torch.arange(6) != 2),
        lambda x: _causal(x).tril(-1) | (x[0, 0, :, :1] > 0),
        lambda x: torch.zeros(6, 6, dtype=x.dtype) + 0.5,
    ],
    ids=["not causal", "depends on an input", "a bias"],
)
def test_other_masks_stay(make: Callable[[Tensor], Tensor]) -> None:
    captured = normalized(_with_mask(make), randn(2, 3, 6, 4))
    (attention,) = calls(captured.module.graph, aten.scaled_dot_product_attention.default)
    assert arguments(attention)["attn_mask"] is not None


_LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": _causal,
    "packed": lambda x: _causal(x) & (torch.arange(6)[:, None] // 6 == torch.arange(6) // 6),
    "lower triangle": lambda x: torch.ones(6, 6, dtype=torch.bool).tril(),
    "like another": lambda x: torch.ones_like(x @ x.mT, dtype=torch.bool).tril(),
    "added": lambda x: x.new_full((6, 6), -math.inf).triu(1),
    "chosen": lambda x: torch.where(_causal(x), 0.0, -math.inf).to(x.dtype),
}
_LARGE_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "window": lambda x: _causal(x) & (torch.arange(6) > torch.arange(6)[:, None] - 5),
    "last row": lambda x: _causal(x) & (torch.arange(6)[:, None] < 5),
    "corner": lambda x: torch.ones(6, 6, dtype=torch.bool).tril(1),
    "shifted": lambda x: _causal(x).roll(1, -2),
    "depends on an input": lambda x: _causal(x) & (x[:, :, :, :1] > -100),
    "first key of all queries": lambda x: torch.arange(6)[None] < 1,
}


@pytest.mark.parametrize("name", [*_LARGE, *_LARGE_OTHERS])
@pytest.mark.parametrize("elements", [6, 12, 24])
def test_a_large_mask_is_computed_by_rows(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_MAX_ELEMENTS", "_ROW_ELEMENTS"):
        monkeypatch.setattr(f"sp_compiler.passes.normalize.attention.{limit}", elements)
    make = {**_LARGE, **_LARGE_OTHERS}[name]
    captured = normalized(_with_mask(make), randn(2, 3, 6, 4))
    (attention,) = calls(captured.module.graph, aten.scaled_dot_product_attention.default)
    assert arguments(attention)["is_causal"] is (name in _LARGE)
    assert (arguments(attention)["attn_mask"] is None) is (name in _LARGE)


def test_a_large_mask_that_stays_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_compiler.passes.normalize.attention._LARGE_BYTES", 36)
    for name, notes in (("window", 1), ("packed", 0)):
        make = {**_LARGE, **_LARGE_OTHERS}[name]
        captured = normalized(_with_mask(make), randn(1, 3, 6, 4))
        assert len(captured.notes) == notes
        assert all("mask of [1, 1, 6, 6] takes 36 B on every rank" in x for x in captured.notes)


def test_a_mask_of_nothing_but_ones_is_open_in_all_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sp_compiler.passes.normalize.attention._ROW_ELEMENTS", 6)
    captured = normalized(_with_mask(lambda x: x.new_ones(6, 6, dtype=torch.bool)), randn(1, 6, 4))
    (attention,) = calls(captured.module.graph, aten.scaled_dot_product_attention.default)
    assert arguments(attention)["attn_mask"] is None
    assert not arguments(attention)["is_causal"]


def _corner(offset: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention with fewer queries than keys, whose triangle starts at the given column."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(4, 6, dtype=torch.bool).tril(offset)
        return F.scaled_dot_product_attention(query, key, value, mask)

    return attention


@pytest.mark.parametrize(("offset", "is_causal"), [(0, True), (2, False), (1, False)])
def test_only_a_triangle_at_the_top_left_is_causal(offset: int, is_causal: bool) -> None:
    """As fused attention aligns it; at the bottom right it is what a cache of keys needs."""
    args = randn(2, 3, 4, 8), randn(2, 3, 6, 8), randn(2, 3, 6, 8)
    captured = normalized(_corner(offset), *args)
    (attention,) = calls(captured.module.graph, aten.scaled_dot_product_attention.default)
    assert arguments(attention)["is_causal"] is is_causal
    assert (arguments(attention)["attn_mask"] is None) is is_causal
    expected = _corner(offset)(*args)
    torch.testing.assert_close(outputs(captured, *args)[0], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("lowest", [-1.0, -1e4, -1e300])
def test_a_soft_triangle_stays(lowest: float) -> None:
    """A number that is added to scores forbids them only if it is the lowest."""
    x = randn(2, 3, 6, 4)
    attend = _with_mask(lambda x: x.new_full((6, 6), lowest).triu(1))
    captured = normalized(attend, x)
    (attention,) = calls(captured.module.graph, aten.scaled_dot_product_attention.default)
    assert arguments(attention)["attn_mask"] is not None
    assert torch.equal(outputs(captured, x)[0], attend(x))


def test_layers_share_one_causal_mask() -> None:
    captured = capture(zoo.build("gpt2", dropout=0.1), (), zoo.inputs("gpt2"))
    normalize(captured)
    (mask,) = calls(captured.module.graph, aten.tril.default)
    assert len(mask.users) == 2
    assert "nn_module_stack" not in mask.meta
