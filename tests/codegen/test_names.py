"""Names of values in generated code: from the user's own source, else their module or operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.codegen.names import ValueNames
from sp_compiler.ir.program import Region
from sp_compiler.passes.memory.partition import partition
from sp_compiler.passes.memory.split_backward import split_backward
from sp_compiler.passes.memory.tag import tag_recompute
from tests.helpers.compiled_region import compile_region, differentiate
from tests.helpers.regions import TP1, random_inputs, region_of, sp

X = torch.randn(4, 6)


def names_of(region: Region) -> dict[str, str]:
    """The best name of each value."""
    joint = differentiate(region)
    names = ValueNames(joint)
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    return {node.name: names.candidates(node)[0] for node in nodes}


def forward_names(module: nn.Module, *args: Tensor) -> set[str]:
    return set(names_of(region_of(module, *(args or (X,)))).values())


class Statements(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = (
            x.sin()
            * 2.0
        )  # fmt: skip
        annotated: Tensor = scores.exp()
        scores -= annotated
        annotated = annotated * scores
        first, second = annotated.split(3, dim=-1)
        left, right = first.cos(), second.tanh()
        (walrus := left * right)
        return F.relu(walrus.sum(-1))


def test_names_come_from_the_statement_that_assigns() -> None:
    names = forward_names(Statements())
    assert {"scores", "annotated", "first", "second", "left", "right", "walrus", "relu"} <= names
    assert {"sin", "sum_"} <= names  # parts of a statement's expression, which it does not assign
    assert not {"exp", "split_0", "sub"} & names


class Ambiguous(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        total = x
        for _ in range(3):
            total = total + x.sin()
        a = x.cos(); b = a.exp()  # noqa: E702  # fmt: skip
        picked = [y := x.tanh(), y.sigmoid()][1]
        later = lambda z: z.rsqrt()  # noqa: E731
        return total, b, picked, later(x)


def test_what_is_not_certain_is_not_claimed() -> None:
    names = forward_names(Ambiguous())
    assert "total" in names  # the last of the loop alone has a use outside of it
    assert {"cos", "exp", "tanh", "sigmoid", "rsqrt", "sin", "add"} <= names
    assert not {"a", "b", "y", "picked", "later"} & names


def test_names_of_lines_that_cannot_be_found_are_those_of_operators() -> None:
    namespace: dict[str, object] = {"nn": nn}
    text = (
        "class M(nn.Module):\n    def forward(self, x):\n        y = x.sin()\n        return y * 2"
    )
    exec(compile(text, "<nowhere>", "exec"), namespace)
    names = forward_names(namespace["M"]())  # type: ignore[operator]
    assert {"sin", "mul"} <= names


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(6, 6)
        self.c_proj = nn.Linear(6, 6)
        self.act = nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        query, _weights = _twice(self.c_attn(x))
        return self.c_proj(self.act(query * 2.0))


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x


def test_names_come_from_modules_else_and_gradients_from_values() -> None:
    names = forward_names(Attend())
    assert {"c_attn", "c_proj", "act_1", "query"} <= names
    assert {"grad_query", "grad_c_attn_weight", "grad_c_proj_bias", "grad_x"} <= names
    assert not {"_weights", "linear", "addmm"} & names


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.saved = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        tp = x * self.saved
        torch_ = tp.sin()
        print = torch_ + tp
        device = print.exp()
        aten_gelu = F.gelu(device)
        return F.gelu(aten_gelu * device, approximate="tanh")


def test_names_hide_nothing_that_the_code_uses() -> None:
    region = region_of(Keywords(), X)
    compiled = compile_region(region, recompute="selective")
    names = set(compiled.text.names.values())
    assert names.isdisjoint({"tp", "torch", "F", "saved", "device", "print", "aten_gelu_backward"})
    assert {"tp_", "saved_", "device_"} <= names


class Passed(nn.Module):
    """Locals with the names of the tuples that functions of a backward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rest = torch.tanh(x)
        rest_behind = torch.sigmoid(self.up(rest))
        return self.down(rest_behind) * x


def test_values_named_like_what_functions_pass_on() -> None:
    region = region_of(Passed().double(), X.double())
    joint = differentiate(region)
    tag_recompute(joint, "none")
    parts = split_backward(partition(joint), region.input_kinds)
    compiled = CompiledRegion(region, parts, joint)
    assert {"rest_", "rest_behind_"} <= set(compiled.text.names.values())
    (y,), saved = compiled.code.forward(TP1, *random_inputs(region))
    whole = compiled.code.backward(TP1, saved, y)
    early, rest = compiled.code.backward_inputs(TP1, saved, y)
    late = compiled.code.backward_weights(TP1, list(rest))
    for expected, *found in zip(whole, early, late, strict=True):
        assert [torch.equal(each, expected) for each in found if each is not None] == [True]


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x.sin()
        y = self.proj(sp.convert(normed, "S(0)", "R", 1))
        return sp.convert(y, "P", "S(0)", 1).exp()


def test_values_on_their_way_are_called_after_the_value() -> None:
    names = forward_names(Gathered())
    assert {"normed", "normed_gathered", "proj_partial", "proj"} <= names
    assert {"grad_normed_gathered", "grad_normed", "grad_proj_gathered"} <= names
