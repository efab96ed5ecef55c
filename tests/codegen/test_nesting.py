"""Nesting of expressions: its limits, and that neither kernels nor memory change."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_compiler.codegen.idioms import Idioms
from sp_compiler.codegen.module_text import CompiledRegion, printed_regions, region_text
from sp_compiler.codegen.nesting import Apart, Nesting
from sp_compiler.cost.memory import function_peak_bytes
from tests.helpers import parity
from tests.helpers.compiled_region import compile_region
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.regions import TP1, gpt_region, random_inputs, region_of, sp

aten = torch.ops.aten
X = torch.randn(4, 6)


def body_of(module: nn.Module, *args: Tensor, grad: bool = False) -> list[str]:
    """Statements of the forward, without comments."""
    args = args or (X,)
    region = region_of(module, *args, requires_grad=[grad and x.is_floating_point() for x in args])
    source = compile_region(region, recompute="none").source
    text = source.partition("def forward(")[2].partition("    saved = ")[0]
    lines = [line.partition("  # ")[0].strip() for line in text.splitlines()[1:]]
    return [line for line in lines if line and not line.startswith("#")]


class Once(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x.reshape(12, 2)
        return torch.where(mask, (y + 1.0) / (y.tanh() - (y - 3.0)), float("-inf"))


def test_values_with_one_use_become_one_expression() -> None:
    mask = torch.ones(12, 2, dtype=torch.bool)
    assert body_of(Once(), X, mask) == [
        "y = x.reshape(-1, 2)",
        'where = torch.where(mask, (y + 1.0) / (torch.tanh(y) - (y - 3.0)), float("-inf"))',
    ]


class Made(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(6)


def test_only_defaults_are_left_out() -> None:
    region = region_of(Made(), X)
    (made,) = region.module.graph.find_nodes(op="call_function", target=torch.ops.aten.ones.default)
    made.update_kwarg("layout", torch.strided)
    for pinned in (None, False, True):
        made.update_kwarg("pin_memory", pinned)
        source = compile_region(region, recompute="none").source
        assert ("pin_memory=True" in source) is bool(pinned)
        assert "layout" not in source


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1.0
        return y * (y - 1.0)


def test_a_value_used_twice_has_a_name() -> None:
    assert body_of(Twice()) == ["y = x + 1.0", "mul = y * (y - 1.0)"]


class Saved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0).exp() * 2.0


def test_a_saved_value_has_a_name() -> None:
    assert body_of(Saved()) == ["mul = (x + 1.0).exp() * 2.0"]
    assert body_of(Saved(), grad=True) == ["exp = (x + 1.0).exp()", "mul = exp * 2.0"]


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mm((x + 1.0).reshape(6, 4), x).reshape(4, 9) * 3.0


@pytest.mark.parametrize(
    ("apart", "statements"),
    [
        ("collectives", ["mul = torch.mm((x + 1.0).reshape(-1, 4), x).reshape(-1, 9) * 3.0"]),
        (
            "products",
            [
                "add = (x + 1.0).reshape(-1, 4)",
                "mm = torch.mm(add, x)",
                "mul = mm.reshape(-1, 9) * 3.0",
            ],
        ),
    ],
)
def test_products_stand_apart_if_asked_for(apart: Apart, statements: list[str]) -> None:
    made = compile_region(region_of(Products(), X, requires_grad=[False]), recompute="none")
    text = region_text(made.region, made.joint, made.partitioned, apart=apart).body
    lines = [line.partition("  # ")[0].strip() for line in text.splitlines()]
    assert [line for line in lines if " = " in line and "saved" not in line] == statements


class Returned(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1.0
        return y * 2.0, y


def test_a_returned_value_has_a_name() -> None:
    assert body_of(Returned()) == ["y = x + 1.0", "mul = y * 2.0"]


class Between(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1.0
        z = sp.convert(x, "S(0)", "R", 1)
        return z * y


def test_nothing_is_computed_on_the_other_side_of_a_collective() -> None:
    assert body_of(Between()) == [
        "y = x + 1.0",
        'x_gathered = tp.all_gather(x, "S(0)", "R")',
        "mul = x_gathered * y",
    ]


class Behind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sp.convert(sp.convert(x, "S(0)", "R", 1), "P", "S(0)", 1) * 2.0


def test_collectives_are_not_nested() -> None:
    lines = body_of(Behind())
    assert len(lines) == 3
    assert not any(line.count("tp.") > 1 for line in lines)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.bernoulli(torch.sigmoid(x))
        z = torch.bernoulli(torch.sigmoid(x + 1.0))
        return z - y


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    lines = [line for line in body_of(Random()) if "bernoulli" in line]
    assert [line.partition(" = ")[0] for line in lines] == ["y", "z"]


class Peak(nn.Module):
    """``wide`` is freed before the square of ``narrow`` is made, which is when most is held."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.expand(8, 4, 6).sin()
        narrow = wide.cumsum(0)
        return (narrow * 2.0).expand(2, 8, 4, 6) + x


def test_nothing_is_nested_that_would_be_held_for_longer() -> None:
    lines = body_of(Peak())
    assert lines[-3:] == [
        "mul = (narrow * 2.0).expand([2, 8, 4, 6])",
        "del narrow",
        "add = mul + x",
    ]


class _Held(TorchDispatchMode):
    """The most bytes of storages made under it that exist at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._made.values()))
        return result


def measured_peaks(compiled: CompiledRegion) -> tuple[int, int]:
    """Of the text that runs, forward and backward."""
    inputs = [x.detach() for x in random_inputs(compiled.region)]
    with _Held() as forward:
        outputs, saved = compiled.code.forward(TP1, *inputs)
    tangents = [torch.ones_like(x) for x in outputs]
    with _Held() as backward:
        compiled.code.backward(TP1, saved, *tangents)
    return forward.peak_bytes, backward.peak_bytes


@pytest.mark.parametrize("policy", ["none", "attention", "selective", "full"])
def test_the_peak_is_at_most_that_of_a_statement_per_operator(policy: str) -> None:
    compiled = compile_region(gpt_region(2, 16, 32, 4, dtype=torch.float64), recompute=policy)
    parts = compiled.partitioned
    assert parts.backward is not None
    forward, backward = measured_peaks(compiled)
    assert forward <= function_peak_bytes(parts.forward)
    assert backward <= function_peak_bytes(parts.backward)
    assert re.search(r"torch\.matmul\(.*\) [*/] ", compiled.source)  # and something is nested


def test_the_peak_of_a_backward_with_several_results_at_once() -> None:
    """Each result of a norm's or an attention's backward is freed once, with its own part."""
    found = parity.case("lora", 3, 12)
    program = parity.compiled(found, tp=1, recompute="selective")
    compiled = printed_regions(program)["LoraBlock2"]
    parts = compiled.partitioned
    assert parts.backward is not None
    assert measured_peaks(compiled)[1] <= function_peak_bytes(parts.backward)


@pytest.mark.parametrize("handed", [True, False])
def test_what_is_handed_over_counts_until_its_last_use(handed: bool) -> None:
    """Nested, the product would keep 2 units in a statement with 3; the peak is 4.5."""
    b = GraphBuilder()
    w, x, y, v = (
        b.input(*each) for each in (("w", 10, 20), ("x", 20, 10), ("y", 20, 10), ("v", 35, 10))
    )
    given = b.input("given", 10, 10)
    given.meta["handed"] = handed
    named = b.call(aten.exp.default, x)
    first = b.call(aten.sum.default, named)
    product = b.call(aten.mm.default, w, named)
    small = b.call(aten.sum.default, b.call(aten.mm.default, y, given))
    late = b.call(aten.mm.default, v, b.call(aten.exp.default, product))
    graph = b.output(late, small, first)
    nesting = Nesting(graph, Idioms(graph), gradients=False, fits=lambda _: True)
    nesting.run()
    assert (product in nesting.nested) is not handed


@pytest.mark.parametrize("held_before", [True, False])
def test_a_gradient_that_is_made_later_makes_no_room(held_before: bool) -> None:
    """Nested in its view, it would keep what it reads under a larger product; it may not count."""
    b = GraphBuilder()
    x, y = b.input("x", 10, 10), b.input("y", 10, 20)
    w = b.input("w", 10, 40 if held_before else 20)
    first = b.call(aten.sum.default, b.call(aten.mm.default, x, w))
    grad = b.call(aten.mm.default, b.call(aten.mm.default, x, x), x)
    second = b.call(aten.sum.default, b.call(aten.mm.default, x, y))
    graph = b.output(first, second, b.call(aten.view.default, grad, [100]))
    nesting = Nesting(graph, Idioms(graph), gradients=True, fits=lambda _: True)
    nesting.run()
    assert (grad in nesting.nested) is held_before


def test_a_sum_in_place_counts_what_it_reads() -> None:
    """Nested, it would keep ``left`` under the largest statement."""
    b = GraphBuilder()
    square, x, y = b.input("square", 10, 10), b.input("x", 10, 60), b.input("y", 50, 10)
    right = b.input("right", 60, 10)
    left = b.call(aten.exp.default, x)
    first = b.call(aten.sum.default, left)
    total = b.call(aten.sum.dim_IntList, b.input("z", 10, 10, 10), [0])
    added = b.call(sp.add_product.default, total, left, right, 1)
    largest = b.call(aten.sum.default, b.call(aten.mm.default, y, square))
    graph = b.output(b.call(sp.add_product.default, added, square, square, 1), first, largest)
    nesting = Nesting(graph, Idioms(graph), gradients=False, fits=lambda _: True)
    nesting.run()
    assert added not in nesting.nested


def test_work_grows_with_the_function_and_not_with_its_square() -> None:
    """A loop that is not rolled up may have thousands of statements."""

    def statements_looked_at(rounds: int) -> int:
        b = GraphBuilder()
        w, large, mm = b.input("w", 6, 6), b.input("large", 9, 6, 6), aten.mm.default
        x = b.call(aten.sum.dim_IntList, b.call(aten.exp.default, large), [0])
        for _ in range(rounds):
            x = b.call(aten.tanh.default, b.call(mm, b.call(aten.exp.default, x), w))
        graph = b.output(x)
        nesting = Nesting(graph, Idioms(graph), False, fits=lambda node: node.target != mm)
        look = nesting._storages.held
        counts = []

        def counted(trees: Any, *others: Any) -> Any:
            counts.append(len(trees))
            return look(trees, *others)

        with mock.patch.object(nesting._storages, "held", counted):
            nesting.run()
        assert len(nesting.nested) > rounds
        return sum(counts)

    assert statements_looked_at(120) < 2.5 * statements_looked_at(60)
