"""Normalisation: the same numbers, in the one form that later passes know."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.rewriting import calls, is_call
from sp_compiler.ir.text import render
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.reference import run_captured
from tests.models import zoo
from tests.trace.test_export import largest_error, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten
sp = torch.ops.sp_compiler


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def captured_from(function: Callable[..., Any], *args: Tensor) -> Captured:
    return capture(Function(function), args)


def normalized(
    function: Callable[..., Any], *args: Tensor, dropout: Any = "regenerate"
) -> Captured:
    captured = captured_from(function, *args)
    normalize(captured, dropout=dropout)
    return captured


def text(captured: Captured) -> str:
    return render(captured.module.graph)


def body(captured: Captured) -> list[str]:
    """The graph's calls and output, without placeholders."""
    return [line for line in text(captured).splitlines() if "placeholder[" not in line]


def outputs(captured: Captured, *args: Tensor, seed: int = 0) -> list[Any]:
    leaves, _ = flatten_inputs(args)
    return run_captured(captured, {}, {}, leaves, torch.tensor(seed)).outputs


def randn(*size: int, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("name", zoo.names())
def test_normalized_zoo_equals_eager(name: str) -> None:
    model, kwargs = zoo.build(name), zoo.inputs(name)
    captured = capture(model, (), kwargs)
    normalize(captured)
    loss = zoo.loss_of(run(captured, model, **kwargs).outputs)
    expected = zoo.loss_of(model(**kwargs))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert largest_error(model, expected, loss) < 1e-13


@pytest.mark.parametrize("name", ["gpt2", "t5", "encoder_causal", "vit"])
@pytest.mark.parametrize("dropout", ["regenerate", "stored"])
def test_normal_form(name: str, dropout: Any) -> None:
    """What holds afterwards, and that a second run finds nothing to do."""
    captured = capture(zoo.build(name, dropout=0.1), (), zoo.inputs(name))
    normalize(captured, dropout=dropout)
    graph = captured.module.graph
    for node in calls(graph, *(node.target for node in graph.nodes)):
        assert node.meta["val"] is not None
        assert isinstance(node.meta["requires_grad"], bool)
        if node.target is operator.getitem:
            continue
        assert not node.target._schema.is_mutable
        bound = arguments(node)
        dims = [bound.get(key) for key in ("dim", "dim0", "dim1")]
        if node.target.namespace == "aten":
            assert all(dim < 0 for dim in dims if isinstance(dim, int))
        assert not is_call(node, aten.scaled_dot_product_attention.default)
        assert bound.get("bias") is None or not is_call(node, aten.linear.default)
    assert captured.refs[-1].kind == "seed"
    before = text(captured)
    normalize(captured, dropout=dropout)
    assert text(captured) == before


def test_copies_casts_and_views() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.contiguous().to(torch.float64).clone().flatten(1).view(2, -1, 3)
        return y.to(torch.float32).squeeze(1).detach() + x.detach().sum()

    assert "\n".join(body(normalized(function, randn(2, 3, 4, grad=True)))) == "\n".join(
        [
            "%1 = aten.reshape(%0, [2, 4, 3]) : f64[2, 4, 3]",
            "%2 = aten._to_copy(%1, dtype=torch.float32) : f32[2, 4, 3]",
            "%3 = aten.detach(%2) : f32[2, 4, 3]",
            "%4 = aten.detach(%0) : f64[2, 3, 4]",
            "%5 = aten.sum(%4) : f64[]",
            "%6 = aten.add.Tensor(%3, %5) : f32[2, 4, 3]",
            "output(%6)",
        ]
    )


def _packed_attention_inputs(x: Tensor) -> tuple[Tensor, ...]:
    """What ``nn.MultiheadAttention`` does to the product of its packed weight."""
    packed = x.unflatten(-1, (3, 4)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return packed[0], packed[1], packed[2]


@pytest.mark.parametrize("size", [(5, 2, 12), (5, 1, 12), (1, 1, 12)])
def test_packed_projection_is_split(size: tuple[int, ...]) -> None:
    x = randn(*size)
    captured = normalized(_packed_attention_inputs, x)
    part = f"f64[{size[0]}, {size[1]}, 4]"
    assert body(captured) == [
        f"%1 = aten.split_with_sizes(%0, [4, 4, 4], -1) : ({part}, {part}, {part})",
        f"%2 = getitem(%1, 0) : {part}",
        f"%3 = getitem(%1, 1) : {part}",
        f"%4 = getitem(%1, 2) : {part}",
        "output(%2, %3, %4)",
    ]
    assert all(map(torch.equal, outputs(captured, x), _packed_attention_inputs(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.unflatten(-1, (3, 4))[:, 1],
        lambda x: x.unflatten(-1, (3, 4)).transpose(0, 1)[:, :, 0],
        lambda x: x.unflatten(-1, (3, 4)).flatten(0, 1)[:, 0],
    ],
    ids=["another dim", "other order", "merged dims"],
)
def test_other_selections_stay(function: Callable[[Tensor], Tensor]) -> None:
    captured = normalized(function, randn(5, 2, 12))
    assert not list(calls(captured.module.graph, aten.split_with_sizes.default))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y[..., :8], y[..., 8:10], y[..., 10:]),
        lambda y: (y[..., -2:], y[..., :8], y[..., 8:-2]),
        lambda y: (y[..., 10:], y[..., :8], y[..., 8:10], y[:1] * 2),
    ],
    ids=["in order", "from the end", "with another use"],
)
def test_slices_of_a_product_are_its_split(function: Callable[[Tensor], Any]) -> None:
    def sliced(x: Tensor, w: Tensor) -> Any:
        return function(x @ w.T)

    x, w = randn(2, 5, 6, grad=True), randn(12, 6, grad=True)
    captured = normalized(sliced, x, w)
    (split,) = calls(captured.module.graph, aten.split_with_sizes.default)
    assert split.args[1:] == ([8, 2, 2], -1)
    assert all(map(torch.equal, outputs(captured, x, w), sliced(x, w)))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y[..., :8], y[..., 7:]),
        lambda y: (y[..., :8], y[..., 9:]),
        lambda y: (y[..., 1:8], y[..., 8:]),
        lambda y: (y[..., :8], y[..., 8:11]),
        lambda y: (y[..., :8], y[..., :8] * 2, y[..., 8:]),
        lambda y: (y[:, :2], y[:, 2:]),
        lambda y: ((y * 2)[..., :8], (y * 2)[..., 8:]),
    ],
    ids=["overlap", "hole", "no start", "no end", "twice", "another dim", "no product"],
)
def test_other_slices_stay(function: Callable[[Tensor], Any]) -> None:
    def sliced(x: Tensor, w: Tensor) -> Any:
        return function(x @ w.T)

    x, w = randn(2, 5, 6, grad=True), randn(12, 6, grad=True)
    captured = normalized(sliced, x, w)
    assert not list(calls(captured.module.graph, aten.split_with_sizes.default))
    assert all(map(torch.equal, outputs(captured, x, w), sliced(x, w)))


def test_splits_slices_and_dims() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, dim=2)
        third, _ = x.split(4, dim=2)
        part = x[:, -2:, :4].softmax(1) + x[:, :, :4].sum(1, keepdim=True)
        return torch.cat([first, second, third]).transpose(
            0, 1
        ), part.t() if part.ndim == 2 else part

    assert body(normalized(function, randn(2, 3, 8))) == [
        "%1 = aten.split_with_sizes(%0, [4, 4], -1) : (f64[2, 3, 4], f64[2, 3, 4])",
        "%2 = getitem(%1, 0) : f64[2, 3, 4]",
        "%3 = getitem(%1, 1) : f64[2, 3, 4]",
        "%4 = aten.split_with_sizes(%0, [4, 4], -1) : (f64[2, 3, 4], f64[2, 3, 4])",
        "%5 = getitem(%4, 0) : f64[2, 3, 4]",
        "%6 = aten.slice.Tensor(%0, -2, 1, 3) : f64[2, 2, 8]",
        "%7 = aten.slice.Tensor(%6, -1, 0, 4) : f64[2, 2, 4]",
        "%8 = aten.softmax.int(%7, -2) : f64[2, 2, 4]",
        "%9 = aten.slice.Tensor(%0, -1, 0, 4) : f64[2, 3, 4]",
        "%10 = aten.sum.dim_IntList(%9, [-2], True) : f64[2, 1, 4]",
        "%11 = aten.add.Tensor(%8, %10) : f64[2, 2, 4]",
        "%12 = aten.cat([%2, %3, %5], -3) : f64[6, 3, 4]",
        "%13 = aten.transpose.int(%12, -3, -2) : f64[3, 6, 4]",
        "output(%13, %11)",
    ]


def test_bias_is_added_by_its_own_node() -> None:
    args = randn(2, 3, 4), randn(5, 4), randn(5)
    captured = normalized(F.linear, *args)
    assert body(captured) == [
        "%3 = aten.linear(%0, %1) : f64[2, 3, 5]",
        "%4 = aten.add.Tensor(%3, %2) : f64[2, 3, 5]",
        "output(%4)",
    ]
    torch.testing.assert_close(outputs(captured, *args)[0], F.linear(*args), rtol=1e-14, atol=1e-14)


def test_addmm_on_flattened_rows_becomes_a_product_of_the_whole() -> None:
    def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x.view(-1, 4), weight).view(2, 3, 5)

    args = randn(2, 3, 4), randn(4, 5), randn(5)
    captured = normalized(conv1d, *args)
    assert body(captured) == [
        "%3 = aten.matmul(%0, %1) : f64[2, 3, 5]",
        "%4 = aten.add.Tensor(%3, %2) : f64[2, 3, 5]",
        "output(%4)",
    ]
    torch.testing.assert_close(outputs(captured, *args)[0], conv1d(*args), rtol=1e-14, atol=1e-14)


def test_addmm_keeps_rows_that_another_value_uses() -> None:
    def near_miss(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.addmm(bias, x.view(-1, 4), weight)
        return rows.view(2, 3, 5), rows.view(3, 2, 5)

    captured = normalized(near_miss, randn(2, 3, 4), randn(4, 5), randn(5))
    assert body(captured)[:3] == [
        "%3 = aten.reshape(%0, [6, 4]) : f64[6, 4]",
        "%4 = aten.matmul(%3, %1) : f64[6, 5]",
        "%5 = aten.add.Tensor(%4, %2) : f64[6, 5]",
    ]


def test_scaled_addmm_is_left_alone() -> None:
    def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight, alpha=2)

    captured = normalized(scaled, randn(3, 4), randn(4, 5), randn(5))
    assert body(captured)[0].startswith("%3 = aten.addmm(")


@pytest.mark.parametrize("size", [(1, 3, 4), (3, 4), (1, 3, 1)])
def test_operand_without_batch_is_expanded(size: tuple[int, ...]) -> None:
    captured = normalized(torch.add, randn(2, 3, 4), randn(*size))
    wide = [2, 3, size[-1]]
    assert body(captured)[0].startswith(f"%2 = aten.expand(%1, {wide})")


@pytest.mark.parametrize("size", [(4,), (2, 1, 4), (1, 1, 4), ()])
def test_other_broadcasts_stay(size: tuple[int, ...]) -> None:
    captured = normalized(torch.add, randn(2, 3, 4), randn(*size))
    assert body(captured)[0] == "%2 = aten.add.Tensor(%0, %1) : f64[2, 3, 4]"


def _views(x: Tensor, *steps: tuple[Any, ...]) -> Tensor:
    for name, *args in steps:
        x = getattr(x, name)(*args)
    return x


HEADS = [("reshape", 5, 8, 3), ("transpose", 0, 1), ("reshape", 2, 4, 5, 3)]


@pytest.mark.parametrize(
    ("size", "steps", "short"),
    [
        (
            (5, 2, 12),
            HEADS,
            ["aten.reshape(%0, [5, 2, 4, 3])", "aten.permute(%1, [-3, -2, -4, -1])"],
        ),
        (
            (2, 5, 12),
            [("transpose", 0, 1), *HEADS],
            ["aten.reshape(%0, [2, 5, 4, 3])", "aten.transpose.int(%1, -3, -2)"],
        ),
        (
            (2, 4, 5, 3),
            [("permute", 2, 0, 1, 3), ("reshape", 5, 2, 12), ("transpose", 0, 1)],
            ["aten.transpose.int(%0, -3, -2)", "aten.reshape(%1, [2, 5, 12])"],
        ),
        ((2, 6), [("reshape", 4, 3), ("t",), ("t",), ("reshape", 2, 6)], []),
        ((4, 6), [("t",), ("reshape", 4, 6), ("t",)], None),
        ((2, 3, 4), [("transpose", 0, 1), ("reshape", 3, 8)], None),
    ],
    ids=["heads", "swapped heads", "back", "nothing", "not a product", "as short as can be"],
)
def test_view_chains_get_shorter(
    size: tuple[int, ...], steps: list[tuple[Any, ...]], short: list[str] | None
) -> None:
    x = randn(*size)
    captured = normalized(lambda x: _views(x, *steps) * 2, x)
    lines = [line.split(" = ")[1].split(" : ")[0] for line in body(captured)[:-2]]
    if short is not None:
        assert lines == short
    else:
        assert len(lines) == len(steps)
    assert torch.equal(outputs(captured, x)[0], _views(x, *steps) * 2)


def test_view_used_twice_stays() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        view = x.transpose(0, 1)
        return view * 2, view.transpose(0, 1) * 3

    assert "aten.transpose.int(%1, -2, -1)" in "".join(body(normalized(function, randn(2, 3))))


def test_products_act_on_tokens_as_they_come() -> None:
    """(b, s, h) -> (s, b, h) -> q, k -> rows -> product -> back, as ``nn.MultiheadAttention``."""

    def function(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
        first, second = F.linear(x.transpose(0, 1), weight, bias).split(4, dim=-1)
        core = (first * second).permute(1, 0, 2)
        rows = F.linear(core.transpose(0, 1).reshape(-1, 4), out, bias[4:])
        return rows.view(5, 2, 4).transpose(0, 1)

    args = randn(2, 5, 4), randn(8, 4), randn(8), randn(4, 4)
    captured = normalized(function, *args)
    lines = [line.split(" = ")[1].split("(")[0] for line in body(captured)[:-1]]
    assert lines == [
        "aten.linear", "aten.add.Tensor", "aten.split_with_sizes", "getitem",
        "aten.transpose.int", "getitem", "aten.transpose.int", "aten.mul.Tensor",
        "aten.permute", "aten.slice.Tensor", "aten.linear", "aten.add.Tensor",
    ]  # fmt: skip
    torch.testing.assert_close(outputs(captured, *args)[0], function(*args), rtol=1e-13, atol=1e-13)


def test_dropout_sites_share_one_seed() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(F.dropout(x, 0.1), 0.0), 0.5) + F.dropout(x, 0.5, False)

    captured = normalized(function, randn(4, 5))
    assert [ref.kind for ref in captured.refs] == ["input", "seed"]
    assert body(captured) == [
        "%2 = sp_compiler.dropout(%0, %1, 0.1, 0, 0, 1) : f64[4, 5]",
        "%3 = sp_compiler.dropout(%2, %1, 0.5, 1, 0, 1) : f64[4, 5]",
        "%4 = aten.add.Tensor(%3, %0) : f64[4, 5]",
        "output(%4)",
    ]


def test_stored_dropout_gives_the_same_numbers() -> None:
    x = randn(40, 50)
    regenerated, stored = (
        normalized(lambda x: F.dropout(x, 0.3), x, dropout=kind)
        for kind in ("regenerate", "stored")
    )
    (first,), (second,) = outputs(regenerated, x, seed=7), outputs(stored, x, seed=7)
    torch.testing.assert_close(first, second, rtol=1e-15, atol=0)
    assert 0.2 < float((first == 0).double().mean()) < 0.4
    assert not torch.equal(first, outputs(regenerated, x, seed=8)[0])


def test_certain_dropout_is_zero_with_a_gradient() -> None:
    x = randn(2, 3, grad=True)
    captured = normalized(lambda x: F.dropout(x, 1.0), x)
    (result,) = outputs(captured, x)
    result.sum().backward()
    assert torch.equal(result, torch.zeros(2, 3, dtype=torch.float64))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "function", [torch.rand_like, lambda x: F.dropout1d(x, 0.5), F.alpha_dropout]
)
def test_other_randomness_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    training = (
        (lambda x: F.alpha_dropout(x, 0.5, True)) if function is F.alpha_dropout else function
    )
    with pytest.raises(UnsupportedError, match="random numbers"):
        normalized(training, randn(2, 3, 4))


def _bool_mask(rows: int, columns: int) -> Tensor:
    """Random, with one row that forbids everything."""
    mask = randn(rows, columns) > -0.5
    mask[1] = False
    return mask


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "bool": {"attn_mask": _bool_mask(6, 6)},
    "float": {"attn_mask": randn(2, 1, 6, 6)},
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


def test_layers_share_one_causal_mask() -> None:
    captured = capture(zoo.build("gpt2", dropout=0.1), (), zoo.inputs("gpt2"))
    normalize(captured)
    (mask,) = calls(captured.module.graph, aten.tril.default)
    assert len(mask.users) == 2
    assert "nn_module_stack" not in mask.meta
