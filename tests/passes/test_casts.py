"""Casts to fewer bits: one for all products, in front of the gather, with the numbers of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compiler.compiler
from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.rewriting import fake_value
from sp_compiler.passes.casts import share_casts
from sp_compiler.trace.joint import JointGraph
from tests.helpers import parity
from tests.helpers.graph_builder import text
from tests.models import zoo

Results = tuple[Tensor, ...]

aten = torch.ops.aten
X, W = torch.randn(4, 6), torch.randn(6, 6, dtype=torch.bfloat16)


def _gathered(x: Tensor) -> Tensor:
    return torch.ops.sp_compiler.convert.default(x, "S(0)", "R", 2)


def _reduced(x: Tensor) -> Tensor:
    return torch.ops.sp_compiler.convert.default(x, "P", "S(0)", 2)


def _cast(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return aten._to_copy.default(x, dtype=dtype)


def _two_products(x: Tensor, w: Tensor) -> Results:
    full = _gathered(x.exp())
    return _cast(full) @ w, _cast(full) @ w.t()


def _behind_a_view(x: Tensor, w: Tensor) -> Results:
    return (_cast(aten.view(_gathered(x), [2, 4, 6])).exp(),)


def _of_a_part(x: Tensor, w: Tensor) -> Results:
    return (aten.view(_cast(aten.slice(_gathered(x), 1, 0, 3)), [24]).exp(),)


def _two_gathers(x: Tensor, w: Tensor) -> Results:
    return _gathered(_cast(x)) @ w, _gathered(_cast(x)) @ w.t()


def _gathered_and_read_here(x: Tensor, w: Tensor) -> Results:
    return _cast(_gathered(x)) @ w, _cast(x) @ w


REWRITES: dict[str, tuple[Callable[..., Results], list[str]]] = {
    "products of what is gathered": (
        _two_products,
        [
            "exp = exp(x_1)",
            "_to_copy_2 = _to_copy(exp)",
            "convert_1 = convert(_to_copy_2)",
            "mm = mm(convert_1, w_1)",
            "t = t(w_1)",
            "mm_1 = mm(convert_1, t)",
        ],
    ),
    "gathered behind a view": (
        _behind_a_view,
        [
            "_to_copy_1 = _to_copy(x_1)",
            "convert_1 = convert(_to_copy_1)",
            "view_1 = view(convert_1)",
            "exp = exp(view_1)",
        ],
    ),
    "a part of what is gathered, which the cast copies": (
        _of_a_part,
        [
            "_to_copy_1 = _to_copy(x_1)",
            "convert_1 = convert(_to_copy_1)",
            "slice_2 = slice(convert_1)",
            "clone = clone(slice_2)",
            "view = view(clone)",
            "exp = exp(view)",
        ],
    ),
    "two gathers": (
        _two_gathers,
        [
            "_to_copy = _to_copy(x_1)",
            "convert = convert(_to_copy)",
            "mm = mm(convert, w_1)",
            "t = t(w_1)",
            "mm_1 = mm(convert, t)",
        ],
    ),
    "gathered, and read by the rank itself": (
        _gathered_and_read_here,
        [
            "_to_copy_2 = _to_copy(x_1)",
            "convert_1 = convert(_to_copy_2)",
            "mm = mm(convert_1, w_1)",
            "mm_1 = mm(_to_copy_2, w_1)",
        ],
    ),
    "two gathers of one gradient, say": (
        lambda x, w: (_gathered(x).exp(), _gathered(x).sin()),
        ["convert = convert(x_1)", "exp = exp(convert)", "sin = sin(convert)"],
    ),
}

NEAR_MISSES: dict[str, Callable[..., Results]] = {
    "more bits": lambda x, w: (_cast(_gathered(w), torch.float32).exp(),),
    "as many bits": lambda x, w: (_cast(_gathered(w), torch.float16).exp(),),
    "integers": lambda x, w: (_cast(_gathered(x), torch.int8) + 1,),
    "two dtypes": lambda x, w: (_cast(x).exp(), _cast(x, torch.float16).exp()),
    "a sum over ranks, which would be rounded before": lambda x, w: (_cast(_reduced(x)).exp(),),
    "gathered for others with all bits": lambda x, w: (
        lambda full: (_cast(full).exp(), full.exp())
    )(_gathered(x)),
    "returned, so that the caller may write into it": lambda x, w: (_cast(x), _cast(x).exp()),
    "returned as a view": lambda x, w: (_cast(x).exp(), _cast(x).t()),
}


def _joint(function: Callable[..., Results], num_outputs: int | None = None) -> JointGraph:
    traced = make_fx(function, tracing_mode="fake")(X, W)
    results = traced.graph.output_node().args[0]
    num_inputs = 2 if num_outputs is None else 1
    num_outputs = len(results) if num_outputs is None else num_outputs
    return JointGraph(traced.graph, num_inputs, num_outputs, (0,), ("input",) * num_inputs, "")


def _shared(joint: JointGraph) -> PassReport:
    with reporting(PassReport(Pass.SIMPLIFY)) as report:
        share_casts(joint)
    return report


@pytest.mark.parametrize("case", REWRITES)
def test_rewrites(case: str) -> None:
    function, expected = REWRITES[case]
    joint = _joint(function)
    assert _shared(joint).rewrites > 0
    assert text(joint.graph) == expected
    for node in joint.graph.nodes:
        if node.op == "call_function":
            value = fake_value(node.target, node.args, node.kwargs)
            true = node.meta["val"]
            assert (value.dtype, value.shape) == (true.dtype, true.shape)
            assert value.stride() == true.stride()
    assert _shared(joint).rewrites == 0


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay_as_they_are(case: str) -> None:
    joint = _joint(NEAR_MISSES[case])
    before = str(joint.graph)
    assert _shared(joint).rewrites == 0
    assert str(joint.graph) == before


def test_backward_casts_by_itself() -> None:
    """Else the forward would keep the cast, too, of what it keeps."""
    joint = _joint(lambda x, w: (_cast(x) @ w, _cast(x).t() @ _cast(x) @ w), num_outputs=1)
    _shared(joint)
    assert text(joint.graph) == [
        "_to_copy = _to_copy(x_1)",
        "mm = mm(_to_copy, w_1)",
        "_to_copy_1 = _to_copy(x_1)",
        "t = t(_to_copy_1)",
        "mm_1 = mm(t, _to_copy_1)",
        "mm_2 = mm(mm_1, w_1)",
    ]


def test_autocast_gathers_half_the_bytes_and_computes_the_same() -> None:
    """To the bit, where a cast that the model's products had in common would round sums."""

    def no_change(joint: JointGraph) -> None:
        pass

    model = zoo.build("llama", layers=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = parity.make_case(model, zoo.inputs("llama"), lift_casts=False)
    options: dict[str, Any] = {"tp": 2, "recompute": "none", "overlap": False}
    shared = parity.compiled(found, **options)
    with mock.patch.object(sp_compiler.compiler, "share_casts", no_change):
        apart = parity.compiled(found, **options)
    assert _gathers(apart) - _gathers(shared) == Counter({"(24, 32) f32 R": 1})
    assert _gathers(shared) - _gathers(apart) == Counter({"(24, 32) bf16 R": 1})
    one, other = (parity.simulate(found, each) for each in (shared, apart))
    assert torch.equal(one.outputs[0], other.outputs[0])
    parity.assert_equal_gradients(one, other, most=0.0)


def _gathers(program: CompiledProgram) -> Counter[str]:
    """Return what the forward of a layer gathers."""
    layer = program.code.partition("class LlamaDecoderLayer")[2].partition("def backward")[0]
    return Counter(re.findall(r"tp\.all_gather\(.*<== (.*)", layer))
