"""Numbers that scale products: where they are moved to, near-misses, and what a model gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ops.convert import CONVERT
from sp_compiler.passes import scale_products
from sp_compiler.trace.joint import JointGraph
from tests.helpers import parity

convert = CONVERT.overload
# Queries, keys and a gradient of the scores: of two heads 3 wide, and of 16 tokens.
_generator = torch.Generator().manual_seed(0)
Q, K, G = (
    torch.randn(shape, generator=_generator, dtype=torch.float64)
    for shape in ((2, 16, 3), (2, 3, 16), (2, 16, 16))
)


def _scored(q: Tensor, k: Tensor, number: float = 0.3) -> Tensor:
    return torch.bmm(q, k) * number


def _differentiated(grad: Tensor, q: Tensor, k: Tensor, number: float = 0.3) -> Tensor:
    scaled = grad.exp() * number
    grad_q, grad_k = torch.bmm(scaled, k.mT), torch.bmm(q.mT, scaled)
    return grad_q - grad_k.mT


def _read_twice(x: Tensor) -> Tensor:
    return x * 0.3 + x


# name: function of (Q, K, G), operators that are left in order, where the number is moved to.
REWRITES: dict[str, tuple[Callable[..., Tensor], list[str], str]] = {
    "scores": (lambda q, k, g: _scored(q, k).exp(), ["mul", "bmm", "exp"], "scale_factor"),
    "scores that are returned": (lambda q, k, g: _scored(q, k), ["mul", "bmm"], "scale_factor"),
    "quotient": (lambda q, k, g: torch.bmm(q, k) / 3, ["div", "bmm"], "scale_factor"),
    "negative number": (lambda q, k, g: _scored(q, k, -0.5), ["mul", "bmm"], "scale_factor"),
    "views between": (
        lambda q, k, g: torch.bmm(q, k).view(1, 2, 16, 16).mT * 0.3,
        ["mul", "bmm", "view", "transpose"],
        "scale_factor",
    ),
    "product of two dims": (
        lambda q, k, g: torch.mm(q[0], k[0]) * 0.3,
        ["select", "select", "mul", "mm"],
        "scale_factor",
    ),
    "product with itself": (
        lambda q, k, g: torch.mm(k[0].t().clone()[:3, :1], k[0, :1, :3]) * 0.3,
        ["select", "t", "clone", "slice", "slice", "select", "slice", "slice", "mul", "mm"],
        "scale_factor",
    ),
    "gradient of scores": (
        lambda q, k, g: _differentiated(g, q, k),
        ["exp", "transpose", "bmm", "mul", "transpose", "bmm", "mul", "transpose", "sub"],
        "scale_results",
    ),
    "gradient through views": (
        lambda q, k, g: torch.bmm((g.exp() / 3).view(2, 16, 16).mT, q).exp(),
        ["exp", "view", "transpose", "bmm", "div", "exp"],
        "scale_results",
    ),
}
NEAR_MISSES: dict[str, Callable[..., Tensor]] = {
    "number above one": lambda q, k, g: _scored(q, k, 1.5),
    "quotient above the dividend": lambda q, k, g: torch.bmm(q, k) / 0.5,
    "zero": lambda q, k, g: _scored(q, k, 0.0),
    "quotient by infinity": lambda q, k, g: torch.bmm(q, k) / float("inf"),
    "learned number": lambda q, k, g: torch.bmm(q, k) * g[0, 0, 0],
    "biased product": lambda q, k, g: torch.addmm(g[0], q[0], k[0]) * 0.3,
    "factor as large as the product": lambda q, k, g: torch.bmm(g, g) * 0.3,
    "factor larger than the product": lambda q, k, g: torch.bmm(k, q) * 0.3,
    "product that is read twice": lambda q, k, g: _read_twice(torch.bmm(q, k)),
    "view that is read twice": lambda q, k, g: _read_twice(torch.bmm(q, k).view(-1)),
    "quotient rounded down": lambda q, k, g: torch.div(torch.bmm(q, k), 3, rounding_mode="floor"),
    "factor of 16 bits": lambda q, k, g: _scored(q.half(), k.half()),
    "rows of the product": lambda q, k, g: torch.bmm(q, k)[:1] * 0.3,
    "gathered factor": lambda q, k, g: torch.mm(convert(q[0], "S(0)", "R", 2), k[0]) * 0.3,
    "partial results": lambda q, k, g: convert(torch.mm(g[0].exp() * 0.3, q[0]), "P", "S(0)", 2),
    "part of the product, which a view could not read": lambda q, k, g: (
        torch.bmm(q, k)[:, :, :9] * 0.3
    ),
    "gradient of 16 bits": lambda q, k, g: _differentiated(g.half(), q.half(), k.half()),
    "gradient that is given": lambda q, k, g: torch.bmm(g * 0.3, q),
    "gradient in another order": lambda q, k, g: torch.bmm(g.mT * 0.3, q),
    "gradient above one": lambda q, k, g: _differentiated(g, q, k, 1.5),
    "gradient smaller than the result": lambda q, k, g: torch.bmm(q.exp() * 0.3, k),
    "gradient that others read": lambda q, k, g: _read_by_others(g.exp() * 0.3, q),
    "product of the gradient with itself": lambda q, k, g: _squared(k.exp() * 0.3),
    "gradient that nothing reads": lambda q, k, g: g.exp() * 0.3,
}


def _read_by_others(x: Tensor, q: Tensor) -> Tensor:
    return torch.bmm(x, q) + x.sum()


def _squared(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT)


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_products, "LEAST_ELEMENTS", 1)


def _moved(graph: fx.Graph, first: str = "call") -> PassReport:
    """Run the pass on a region whose first input is of this kind."""
    joint = JointGraph(graph, 3, 1, (), (first, "call", "call"), "Region")
    with reporting(PassReport(Pass.SCALE_PRODUCTS)) as report:
        scale_products.scale_products(joint)
    return report


@pytest.mark.parametrize("case", REWRITES)
def test_rewrites(case: str) -> None:
    function, expected, kind = REWRITES[case]
    traced = make_fx(function, tracing_mode="fake")(Q, K, G)
    assert _moved(traced.graph).kinds == {kind: 1}
    traced.recompile()
    called = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert [node.target.__name__.split(".")[0] for node in called] == expected
    torch.testing.assert_close(traced(Q, K, G), function(Q, K, G), rtol=1e-13, atol=1e-13)
    for node in called:
        value = node.target(*fx.node.map_arg(node.args, lambda x: x.meta["val"]), **node.kwargs)
        assert value.shape == node.meta["val"].shape
        assert value.stride() == node.meta["val"].stride()
    assert _moved(traced.graph).rewrites == 0


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay_as_they_are(case: str) -> None:
    traced = make_fx(NEAR_MISSES[case], tracing_mode="fake")(Q, K, G)
    before = str(traced.graph)
    assert _moved(traced.graph).rewrites == 0
    assert str(traced.graph) == before


def test_powers_of_two_leave_every_bit() -> None:
    def function(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return _scored(q, k, 0.125), _differentiated(g, q, k, 0.125)

    traced = make_fx(function, tracing_mode="fake")(Q, K, G)
    assert _moved(traced.graph).kinds == {"scale_factor": 1, "scale_results": 1}
    traced.recompile()
    for actual, expected in zip(traced(Q, K, G), function(Q, K, G), strict=True):
        assert torch.equal(actual, expected)


def test_weights_are_not_scaled() -> None:
    traced = make_fx(lambda q, k, g: torch.mm(q[0], k[0]) * 0.3, tracing_mode="fake")(Q, K, G)
    before = str(traced.graph)
    assert _moved(traced.graph, "param").rewrites == 0
    assert str(traced.graph) == before
    assert _moved(traced.graph).rewrites == 1


def test_small_results_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = make_fx(lambda q, k, g: _scored(q, k), tracing_mode="fake")(Q, K, G)
    monkeypatch.setattr(scale_products, "LEAST_ELEMENTS", 2 * 16 * 16 + 1)
    assert _moved(traced.graph).rewrites == 0
    monkeypatch.setattr(scale_products, "LEAST_ELEMENTS", 2 * 16 * 16)
    assert _moved(traced.graph).rewrites == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"recompute": "none"}),
        ("gpt2", {"recompute": "selective", "attention_chunks": 2}),
        ("llama", {"recompute": "full"}),
        ("encoder", {"sequence_parallel": False}),
    ],
)
def test_models(name: str, options: dict[str, Any]) -> None:
    """More tokens than a head has features, in all regions, and with dropout."""
    case = parity.case(name, 2, 12, 0.1, layers=1)
    program = parity.compiled(case, tp=2, **options)
    (report,) = (each for each in program.reports if each.name == Pass.SCALE_PRODUCTS)
    assert report.rewrites > 0
    parity.assert_step(case, program)
