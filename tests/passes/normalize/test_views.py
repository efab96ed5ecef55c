"""Chains of views get shorter, and tokens keep their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.normalized import body, normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten
sp = torch.ops.sp_compiler


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


# Batch, sequence and width are one number, so that all shapes fit whichever way dims lie.
_SQUARE = 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x, table: x.transpose(0, 1) + table,
        lambda x, table: (x.reshape(_SQUARE, _SQUARE, _SQUARE) + table).transpose(0, 1),
        lambda x, table: x.transpose(0, 1) + table.unsqueeze(0),
        lambda x, table: x.transpose(0, 1) + table.unsqueeze(1),
        lambda x, table: x.transpose(0, 1) @ (x + table),
        lambda x, table: x.transpose(1, 2) @ table,
        lambda x, table: F.linear(x.transpose(0, 1), table[0]),
        lambda x, table: F.linear(x.transpose(0, 2), table),
        lambda x, table: F.linear(x.permute(2, 0, 1), table).transpose(1, 2),
        lambda x, table: (x.transpose(0, 1) + table).split([1, 3], 1)[1],
        lambda x, table: x.transpose(0, 1).split([1, 3], 0)[1],
    ],
    ids=[
        *("a table", "a table before", "a batch of one", "a sequence of one", "a batch of weights"),
        *("width", "a vector", "ends", "width behind", "a table's split", "a split of the batch"),
    ],
)
def test_swaps_move_through_token_wise_operators_alone(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    args = randn(_SQUARE, _SQUARE, _SQUARE), randn(_SQUARE, _SQUARE)
    captured = normalized(function, *args)
    expected = function(*args)
    torch.testing.assert_close(outputs(captured, *args)[0], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ij,jk->ik", (3, 4), (4, 5)),
        ("ij,jk->ki", (3, 4), (4, 5)),
        ("bij,bjk->bki", (2, 3, 4), (2, 4, 5)),
        ("bsd,hd->hbs", (2, 3, 4), (5, 4)),
        ("hd,bsd->bsh", (5, 4), (2, 3, 4)),
    ],
)
def test_no_dims_move_behind_the_product_of_an_einsum(
    equation: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    x, y = randn(*left), randn(*right)
    captured = normalized(lambda x, y: torch.einsum(equation, x, y), x, y)
    nodes = [node.target for node in captured.module.graph.nodes if node.op == "call_function"]
    (product,) = (
        place
        for place, target in enumerate(nodes)
        if target in (aten.matmul.default, aten.linear.default)
    )
    assert {*nodes[product + 1 :]} <= {aten.reshape.default}
    torch.testing.assert_close(outputs(captured, x, y)[0], torch.einsum(equation, x, y))
