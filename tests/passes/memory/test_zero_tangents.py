"""A backward for zero tangents: what is left of each kind of use, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compiler
from sp_compiler.passes.memory.zero_tangents import drop_zero_tangents
from sp_compiler.trace.autograd_functions.reached import REACHED
from tests.helpers.users import assert_same_gradients, gradients
from tests.models import zoo

aten = torch.ops.aten
Backward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
X = torch.randn(3, 4, dtype=torch.float64)
GIVEN = torch.randn(3, 4, dtype=torch.float64)
ZERO = torch.zeros(3, 4, dtype=torch.float64)

# name: gradients from (saved, given tangent, zero tangent), operators left in order.
REWRITES: dict[str, tuple[Backward, list[str]]] = {
    "sum": (lambda x, g, z: (z + g * x,), ["mul"]),
    "sum, zero second": (lambda x, g, z: (g * x + z,), ["mul"]),
    "difference from zero's other side": (lambda x, g, z: (g - z * x,), []),
    "through linear operators": (lambda x, g, z: (g + (z * x).t().mm(x).mm(x.t()).t(),), []),
    "zero minus": (lambda x, g, z: (z - g,), ["zeros", "sub"]),
    "zero plus a multiple": (lambda x, g, z: (torch.add(z, g, alpha=2),), ["zeros", "add"]),
    "broadcast sum": (lambda x, g, z: (z + g[:1],), ["slice", "zeros", "add"]),
    "joined": (lambda x, g, z: (torch.cat([g, z * x]),), ["zeros", "cat"]),
    "only its shape": (lambda x, g, z: (g * torch.ones_like(z),), ["zeros", "ones_like", "mul"]),
    "reached by nothing": (lambda x, g, z: (g * x, REACHED(x.cos(), [z]) * 0), ["mul"]),
    "reached by another": (lambda x, g, z: (REACHED(x.cos(), [g, z]) + z,), ["cos"]),
    "zeros, but reached": (lambda x, g, z: (REACHED(z * x, [g, z]),), ["zeros"]),
    "one of two results": (lambda x, g, z: (g * x, z * x), ["mul"]),
}


def _traced(function: Backward) -> tuple[Graph, list[Node]]:
    graph = make_fx(function, tracing_mode="fake")(X, GIVEN, ZERO).graph
    graph.output_node().args = (tuple(graph.output_node().args[0]),)
    return graph, graph.find_nodes(op="placeholder")


@pytest.mark.parametrize("name", REWRITES)
def test_uses_of_a_zero(name: str) -> None:
    function, expected = REWRITES[name]
    graph, (_, given, zero) = _traced(function)
    drop_zero_tangents(graph, [given, zero], [zero])
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target.__name__.split(".")[0] for node in calls] == expected
    zeros = [node for node in calls if node.target is aten.zeros.default]
    assert all(node.meta["origin"] == "partition" for node in zeros)
    assert [node.name for node in graph.find_nodes(op="placeholder")] == ["x_1", "g_1"]
    found = GraphModule(nn.Module(), graph)(X, GIVEN)
    for actual, true in zip(found, function(X, GIVEN, ZERO), strict=True):
        torch.testing.assert_close(ZERO if actual is None else actual, true, rtol=0, atol=0)


def test_a_gradient_of_nothing_is_none() -> None:
    graph, (_, given, zero) = _traced(lambda x, g, z: (g * x, z * x))
    drop_zero_tangents(graph, [given, zero], [zero])
    assert graph.output_node().args[0][1] is None


class Head(nn.Module):
    """A loss, and logits divided by a temperature, which the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.temperature = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x)
        return hidden.pow(2).mean(), hidden * self.temperature


@pytest.mark.parametrize("use", ["loss", "logits", "both"])
def test_gradients_from_whatever_is_used(use: str) -> None:
    torch.manual_seed(0)
    model, other = Head().double(), Head().double()
    other.load_state_dict(model.state_dict())
    module, x = sp_compiler.compile(other, tp=1), torch.randn(4, 8, dtype=torch.float64)
    for one in (model, module):
        loss, logits = one(x)
        {"loss": loss, "logits": logits.sum(), "both": loss + logits.sum()}[use].backward()
    assert ("temperature" in gradients(model)) == (use != "loss")
    assert_same_gradients(module, model, 1e-12)


def test_a_step_from_the_loss_makes_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = zoo.inputs("gpt2")["input_ids"]
    module = sp_compiler.compile(zoo.build("gpt2", layers=1), tp=1)
    output = module(ids, labels=ids)
    (name,) = module._sp_state.latest.loss_backwards

    def general(*_: Any) -> Any:
        raise NotImplementedError("takes a tangent of the logits too")

    monkeypatch.setattr(module._sp_state.latest.codes[name], "backward", general)
    output.loss.backward(retain_graph=True)
    with pytest.raises(NotImplementedError, match="of the logits too"):
        (output.loss + output.logits.mean()).backward()
