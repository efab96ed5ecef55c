"""The rule table as a type checker: wrong combinations are refused, offered ones are correct."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.base.placement import Placement
from sp_compiler.base.shards import join_parts, local_part
from sp_compiler.check.derive import allowed, derive
from sp_compiler.ir.fx import tensor_operands
from tests.helpers.graph_builder import GraphBuilder

aten = torch.ops.aten
sp = torch.ops.sp_compiler
WORLD = 2
Shape = tuple[int, ...]


def call(target: Any, *args: Any) -> Node:
    """A node on inputs of the shapes among ``args``, each a tuple or (tuple, dtype) in a dict."""
    builder = GraphBuilder()
    names = (f"x{i}" for i in itertools.count())

    def value(arg: Any) -> Any:
        if isinstance(arg, dict):
            ((shape, dtype),) = arg.items()
            return builder.input(next(names), *shape, dtype=dtype)
        if isinstance(arg, list) and arg and isinstance(arg[0], (tuple, dict)):
            return [value(item) for item in arg]
        return builder.input(next(names), *arg) if isinstance(arg, tuple) else arg

    return builder.call(target, *map(value, args))


def derived(node: Node, *operands: str) -> set[str]:
    found = derive(node, [Placement.parse(text) for text in operands], WORLD)
    return {", ".join(map(str, results)) for results in found}


def test_index_tensors_that_do_not_go_together_are_refused() -> None:
    """Unsharded, the second would be (7, 2), which does not broadcast with (7,)."""
    indices = [{(7,): torch.int64}, {(7, 1): torch.int64}]
    node = call(aten.index_put.default, (5, 6), indices, (7, 7), True)
    assert derived(node, "R", "R", "R", "R") == {"R"}
    assert derived(node, "R", "R", "S(1)", "R") == set()


@pytest.mark.parametrize("reshape", [aten.view.default, aten._unsafe_view.default])
def test_rows_of_heads_in_segments(reshape: Any) -> None:
    """Rows (2 samples, 4 heads, 3 blocks) of which each rank has the same heads of every sample."""
    split = call(reshape, (12, 8), [4, 3, 8])
    assert derived(split, "S(0|12,12)") == {"S(0|4,4)"}
    joined = call(reshape, (4, 3, 8), [12, 8])
    assert derived(joined, "S(0|4,4)") == {"S(0|12,12)"}
    # Samples of another size have no such rows.
    assert derived(split, "S(0|8,16)") == set()


_HEADS, _SCORES = (2, 4, 8, 16), (2, 4, 8, 8)


@pytest.mark.parametrize(
    ("bias", "where", "its", "grad"),
    [
        ((2, 4, 8, 8), "S(1)", "S(1)", "S(1)"),
        ((2, 4, 8, 8), "S(0)", "S(0)", "S(0)"),
        ((2, 1, 8, 8), "S(1)", "R", "P"),
        ((2, 1, 8, 8), "S(0)", "S(0)", "S(0)"),
        ((1, 1, 8, 8), "S(0)", "R", "P"),
        ((1, 1, 8, 8), "S(1)", "R", "P"),
    ],
)
def test_the_gradient_of_a_bias_of_fused_attention(
    bias: Shape, where: str, its: str, grad: str
) -> None:
    """Partial where it is broadcast over what is sharded; there is no kernel on the CPU."""
    target = aten._scaled_dot_product_efficient_attention_backward.default
    builder = GraphBuilder()

    def local(name: str, shape: Shape, placement: str, dtype: torch.dtype = torch.float32) -> Node:
        part = Placement.parse(placement).local_shape(shape, WORLD)
        return builder.input(name, *part, dtype=dtype)

    seed = builder.input("seed", dtype=torch.int64)
    q, k, v, out, grad_out = (local(name, _HEADS, where) for name in ("q", "k", "v", "out", "go"))
    lse = local("lse", _SCORES[:3], where)
    mask = local("bias", bias, its)
    operands = (where,) * 4 + (its,) + (where,) * 2 + ("R", "R")
    for wanted, expected in (
        (True, f"{where}, {where}, {where}, {grad}"),
        (False, f"{where}, {where}, {where}"),
    ):
        node = builder.call(
            target, grad_out, q, k, v, mask, out, lse, seed, seed, 0.0, [True, True, True, wanted]
        )
        found = derived(node, *operands)
        assert {text[: len(expected)] for text in found} == {expected}
        assert all("P" in text for text in found) == (wanted and grad == "P")


Case = tuple[Any, list[Any], list[str]]
REFUSED: dict[str, Case] = {
    "nonlinear of a partial sum": (aten.gelu.default, [(4, 6)], ["P"]),
    "norm of a partial sum": (
        aten.native_layer_norm.default, [(4, 6), [6], None, None, 0.1], ["P"],
    ),
    "partial plus replicated": (aten.add.Tensor, [(4, 6), (4, 6)], ["P", "R"]),
    "partial plus a number": (aten.add.Tensor, [(4, 6), 1.0], ["P"]),
    "partial times partial": (aten.mul.Tensor, [(4, 6), (4, 6)], ["P", "P"]),
    "replicated by partial": (aten.div.Tensor, [(4, 6), (4, 6)], ["R", "P"]),
    "partial by partial": (aten.mm.default, [(4, 6), (6, 2)], ["P", "P"]),
    "fill a partial sum": (
        aten.masked_fill.Scalar, [(4, 6), {(4, 6): torch.bool}, -1.0], ["P", "R"],
    ),
    "another number than zero behind a mask": (
        aten.where.ScalarSelf, [{(4, 6): torch.bool}, -1.0, (4, 6)], ["R", "P"],
    ),
    "pad a partial sum with ones": (aten.constant_pad_nd.default, [(4, 6), [0, 1], 1.0], ["P"]),
    "softmax over a shard": (aten._softmax.default, [(4, 6), -1, False], ["S(1)"]),
    "mean over a shard": (aten.mean.dim, [(4, 6), [0]], ["S(0)"]),
    "norm over a shard": (aten.native_layer_norm.default, [(4, 3), [3], None, None, 0.1], ["S(1)"]),
    "other dims": (aten.add.Tensor, [(4, 4), (4, 4)], ["S(0)", "S(1)"]),
    "other segments": (aten.add.Tensor, [(8, 4), (8, 4)], ["S(0)", "S(0|8,8)"]),
    "other segments, in place": (
        sp.add_part.default, [(8, 4), (8, 4), WORLD], ["S(0|4,12)", "S(0|8,8)"],
    ),
    "partial plus replicated, in place": (
        sp.add_part.default, [(8, 4), (8, 4), WORLD], ["P", "R"],
    ),
    "replicated with a shard of the same size": (aten.add.Tensor, [(4, 6), (4, 6)], ["S(0)", "R"]),
    "replicated weight after a shard": (aten.linear.default, [(4, 6), (2, 6)], ["S(1)", "R"]),
    "bias under a contraction": (
        aten.linear.default, [(4, 3), (2, 3), (2,)], ["S(1)", "S(1)", "R"],
    ),
    "bias under addmm": (aten.addmm.default, [(2,), (4, 3), (3, 2)], ["R", "S(1)", "S(0)"]),
    "lookup in a shard": (aten.embedding.default, [(8, 4), {(2, 3): torch.int64}], ["S(0)", "R"]),
    "cut of a shard": (aten.slice.Tensor, [(4, 6), 0, 0, 2], ["S(0)"]),
    "split of other segments": (aten.split_with_sizes.default, [(4, 6), [2, 4], 1], ["S(1|6,6)"]),
    "join of a shard and a replicated part": (aten.cat.default, [[(4, 6), (4, 6)]], ["S(0)", "R"]),
    "shard that a view takes apart": (aten.view.default, [(3, 4), [2, 6]], ["S(1)"]),
    "segments that are taken apart": (aten.view.default, [(4, 6), [2, 12]], ["S(0|4,2,2)"]),
    "no rule": (aten.renorm.default, [(4, 6), 2, 0, 1.0], ["S(1)"]),
    "random numbers": (aten.bernoulli.default, [(4, 6)], ["R"]),
    "conversion of something else": (sp.convert.default, [(4, 6), "S(0)", "R", WORLD], ["S(1)"]),
    "conversion that is not there": (sp.convert.default, [(4, 6), "R", "P", WORLD], ["R"]),
    "conversion for other ranks": (sp.convert.default, [(4, 6), "S(0)", "R", 3], ["S(0)"]),
    "dropout of a shard as replicated": (
        sp.dropout.default, [(4, 6), (), 0.1, 0, 0, 1], ["S(0)", "R"],
    ),
    "dropout of another dim": (sp.dropout.default, [(4, 6), (), 0.1, 0, 1, 2], ["S(0)", "R"]),
    "replicated dropout as a shard": (sp.dropout.default, [(4, 6), (), 0.1, 0, 0, 2], ["R", "R"]),
    "loss gradient that is partial": (
        sp.vocab_nll_backward.default,
        [(4,), (4, 6), (4,), (4,), -1, 6 * WORLD, WORLD],
        ["P", "S(1)", "R", "R"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    target, args, operands = REFUSED[case]
    node = call(target, *args)
    assert derived(node, *operands) == set()
    placements = [Placement.parse(text) for text in operands]
    ways = [tuple(map(str, way.operands)) for way in allowed(node, placements, WORLD)]
    assert tuple(operands) not in ways


ACCEPTED: dict[str, tuple[Any, list[Any], list[str], set[str]]] = {
    "replicated": (aten.gelu.default, [(4, 6)], ["R"], {"R"}),
    "sum of partial sums": (aten.add.Tensor, [(4, 6), (4, 6)], ["P", "P"], {"P"}),
    "sum in place of segments": (
        sp.add_part.default, [(8, 4), (8, 4), WORLD], ["S(0|4,12)", "S(0|4,12)"], {"S(0|4,12)"},
    ),
    "product in place of segments": (
        sp.add_product.default,
        [(8, 4), (8, 6), (6, 4), WORLD],
        ["S(0|4,12)", "S(0|4,12)", "R"],
        {"S(0|4,12)"},
    ),
    "column-parallel": (aten.linear.default, [(4, 6), (2, 6)], ["R", "S(0)"], {"S(1)"}),
    "row-parallel": (aten.linear.default, [(4, 3), (2, 3)], ["S(1)", "S(1)"], {"P"}),
    "one head a rank": (
        aten.view.default, [(5, 3), [5, 1, 3]], ["S(1)"], {"S(1)", "S(2)", "S(0|2,2,2,2,2)"},
    ),
    "rows of parts": (aten.view.default, [(3, 6), [18]], ["S(1)"], {"S(0|12,12,12)"}),
    "fused heads": (
        aten.split_with_sizes.default, [(4, 6), [2, 4], 1], ["S(1|4,8)"], {"S(1), S(1)"},
    ),
    "a zero behind a mask": (
        aten.where.ScalarSelf, [{(4, 6): torch.bool}, 0, (4, 6)], ["R", "P"], {"P"},
    ),
    "a zero elsewhere than behind a mask": (
        aten.where.ScalarOther, [{(4, 6): torch.bool}, (4, 6), 0], ["R", "P"], {"P"},
    ),
    "heads fused again": (aten.cat.default, [[(2, 6), (4, 6)]], ["S(0)", "S(0)"], {"S(0|4,8)"}),
    "heads of two kinds merged with their features": (
        aten.view.default, [(5, 7, 4, 3), [35, 12]], ["S(2|4,2,2)"], {"S(1|12,6,6)"},
    ),
    "constants": (aten.zeros.default, [[4]], [], {"R", "S(0)", "P"}),
    "ones": (aten.ones.default, [[4]], [], {"R", "S(0)"}),
    "one row for all": (aten.expand.default, [(1, 6), [4, 6]], ["R"], {"R", "S(0)"}),
    "cut elsewhere": (aten.slice.Tensor, [(4, 6), 1, 0, 2], ["S(0)"], {"S(0)"}),
    "conversion": (sp.convert.default, [(4, 6), "S(0)", "R", WORLD], ["S(0)"], {"R"}),
    "vocabulary": (
        sp.vocab_embedding.default, [(4, 6), (3,), 4 * WORLD, WORLD], ["S(0)", "R"], {"P"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepts(case: str) -> None:
    target, args, operands, results = ACCEPTED[case]
    assert derived(call(target, *args), *operands) == results


# Numbers: every strategy that a rule of a gradient offers, on random tensors.


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_GENERATOR)


_GENERATOR = torch.Generator().manual_seed(0)
B, A, Q, D, H = 2, 4, 6, 8, 4
_QKV = [randn(B, A, Q, D) for _ in range(3)]
_OUT, _LSE = aten._scaled_dot_product_flash_attention_for_cpu(*_QKV)
_ROWS = randn(B, Q, H)
_NORM, _MEAN, _RSTD = aten.native_layer_norm(_ROWS, [H], None, None, 1e-5)
_IDS = torch.randint(0, 10, (B, Q), generator=_GENERATOR)

NUMERIC: dict[Any, list[Any]] = {
    aten.gelu_backward.default: [randn(4, 6), randn(4, 6)],
    aten.silu_backward.default: [randn(4, 6), randn(4, 6)],
    aten.tanh_backward.default: [randn(4, 6), randn(4, 6)],
    aten.threshold_backward.default: [randn(4, 6), randn(4, 6), 0],
    aten.detach.default: [randn(4, 6)],
    aten.masked_fill.Scalar: [randn(4, 6), randn(4, 1) > 0, 0.0],
    aten.where.ScalarSelf: [randn(4, 1) > 0, 0.0, randn(4, 6)],
    aten.addmm.default: [randn(6), randn(4, 8), randn(8, 6)],
    aten.linear.default: [randn(4, 8), randn(6, 8), randn(6)],
    aten._softmax_backward_data.default: [
        randn(B, A, Q), randn(B, A, Q).softmax(-1), -1, torch.float64,
    ],
    aten._log_softmax_backward_data.default: [
        randn(B, A, Q), randn(B, A, Q).log_softmax(-1), -1, torch.float64,
    ],
    aten.native_layer_norm.default: [_ROWS, [H], randn(H), randn(H), 1e-5],
    aten.native_layer_norm_backward.default: [
        randn(B, Q, H), _ROWS, [H], _MEAN, _RSTD, randn(H), randn(H), [True, True, True],
    ],
    aten.embedding_dense_backward.default: [randn(B, Q, H), _IDS, 10, -1, False],
    aten.slice_backward.default: [randn(4, 3), [4, 6], 1, 2, 5, 1],
    aten.select_backward.default: [randn(4, 3), [4, 6, 3], 1, 2],
    aten.constant_pad_nd.default: [randn(4, 6), [0, 2], 0],
    aten.tril.default: [randn(4, 6, 6)],
    aten.convolution_backward.default: [
        randn(2, 4, 3, 3), randn(2, 2, 6, 6), randn(4, 2, 2, 2),
        [4], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True],
    ],
    aten._scaled_dot_product_flash_attention_for_cpu.default: list(_QKV),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [
        randn(B, A, Q, D), *_QKV, _OUT, _LSE, 0.0, False,
    ],
}  # fmt: skip
_SIZES = {
    # operators with an argument that is the size of the (local) result: its position
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}
NUMBER_OF_STRATEGIES = {
    # replicated, linear sets, and one for each dim that can be sharded
    aten.gelu_backward.default: 4,
    aten.addmm.default: 5,
    aten.native_layer_norm.default: 3,
    aten.native_layer_norm_backward.default: 4,
    aten.embedding_dense_backward.default: 5,
    aten.convolution_backward.default: 4,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 4,
}


def node_of(target: Any, args: Sequence[Any]) -> Node:
    builder = GraphBuilder()
    names = (f"x{i}" for i in itertools.count())

    def placeholder(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        return builder.input(next(names), *arg.shape, dtype=arg.dtype)

    return builder.call(target, *tree_map(placeholder, list(args)))


@pytest.mark.parametrize("target", NUMERIC, ids=str)
def test_every_strategy_of_a_gradient_gives_the_right_numbers(target: Any) -> None:
    args = NUMERIC[target]
    unsharded = node_of(target, args)
    replicated = [Placement.parse("R")] * len(tensor_operands(unsharded))
    ways = list(dict.fromkeys(allowed(unsharded, replicated, WORLD)))
    ways = [way for way in ways if len(way.operands) == len(replicated)]
    assert len(ways) >= NUMBER_OF_STRATEGIES.get(target, 2)
    expected = _tuple(target(*args))
    for way in ways:
        results = way.results + (Placement.parse("R"),) * (len(expected) - len(way.results))
        ranks = [
            _tuple(target(*_local(target, args, way.operands, results[0], expected[0], rank)))
            for rank in range(WORLD)
        ]
        for result, placement, parts in zip(
            expected, results, zip(*ranks, strict=True), strict=True
        ):
            torch.testing.assert_close(join_parts(parts, placement), result, rtol=0, atol=1e-12)


def test_a_wrong_strategy_gives_wrong_numbers() -> None:
    """The comparison above has teeth."""
    args = NUMERIC[aten._softmax_backward_data.default]
    ranks = [
        aten._softmax_backward_data(*[x.chunk(WORLD, -1)[rank] for x in args[:2]], *args[2:])
        for rank in range(WORLD)
    ]
    wrong = join_parts(ranks, Placement.parse("S(2)"))
    assert not torch.allclose(wrong, aten._softmax_backward_data(*args), atol=1e-3)
    with pytest.raises(RankMismatchError):
        join_parts(ranks, Placement.parse("R"))


def _local(
    target: Any,
    args: Sequence[Any],
    operands: Sequence[Placement],
    placement: Placement,
    result: Tensor,
    rank: int,
) -> list[Any]:
    placements = iter(operands)
    local = [
        local_part(arg, next(placements), rank, WORLD) if isinstance(arg, Tensor) else arg
        for arg in args
    ]
    if target in _SIZES:
        local[_SIZES[target]] = list(placement.local_shape(tuple(result.shape), WORLD))
    return local


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
