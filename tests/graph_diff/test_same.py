"""Nothing is different between a model and itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.fx import Graph

from sp_compiler.base.placement import Placement
from sp_compiler.graph_diff.data import Change
from sp_compiler.graph_diff.diff import diff
from sp_compiler.ir.snapshot import Snapshot
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.slow import slow
from tests.models.architecture import DIVIDING
from tests.models.architectures import build, inputs

# Bloom has autograd functions, whose numbers differ from capture to capture.
_SLOW = ("gemma2", "mixtral", "vit", "whisper")


@pytest.mark.parametrize("name", ["bloom", *map(slow, _SLOW)])
def test_a_model_is_itself(name: str) -> None:
    model = build(name, DIVIDING)
    result = diff(model, model, example_inputs=((), inputs(name, DIVIDING)))
    assert result.is_empty


def _convolutions(*sizes: int) -> nn.Sequential:
    """Norms whose running statistics leave the layer in calls of their own, and dropouts."""
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1))
        for a, b in itertools.pairwise(sizes)
    ]
    flat = [layer for block in layers for layer in block]
    return nn.Sequential(*flat, nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.parametrize(("sizes", "training"), [((3, 8, 8), False), slow((3, 8, 8, 4, 4), True)])
def test_layers_that_are_called_twice_are_themselves(
    sizes: tuple[int, ...], training: bool
) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = _convolutions(*sizes)
    model(x)
    model.train(training)
    for _ in range(3):
        result = diff(model, model, example_inputs=((x,), {}))
        assert str(result) == "no difference"
        assert result.is_empty
        assert not result.counts


def _placed(*placements: str) -> Graph:
    builder = GraphBuilder()
    x = builder.input("x", 4, 4)
    y = builder.call(torch.ops.aten.relu.default, x)
    for node, text in zip((x, y), placements, strict=True):
        if text:
            node.meta["placement"] = Placement.parse(text)
    return builder.output(y)


def test_a_value_that_stays_whole_has_not_changed() -> None:
    """On one rank that is every value."""
    unplaced = _placed("", "")
    for first, second in ((unplaced, _placed("I", "I")), (_placed("I", "I"), unplaced)):
        assert diff(first, second).is_empty
    for placement in ("R", "P", "S(0)"):
        for first, second in (("", placement), ("I", placement), (placement, "I")):
            result = diff(_placed("I", first), _placed("", second))
            changes = [change for entry in result.entries for change in entry.changes]
            assert changes == [Change("placement", first, second)]


def _unary(function: str) -> Graph:
    graph = Graph()
    operation = getattr(torch.ops.aten, function).default
    graph.output((graph.call_function(operation, (graph.placeholder("x"),)),))
    return graph


def test_each_of_several_calls_of_a_layer_is_compared_with_its_own() -> None:
    """A norm in training mode is called once more behind the layers, for its running statistics."""
    layers = ("h.0", "h.1")
    calls = [(path, name) for name in ("A", "A2") for path in layers]
    first = Snapshot("", {"A": _unary("relu"), "A2": _unary("detach")}, calls)
    assert diff(first, first).is_empty
    # One more kind of layer, which takes the number of the second calls.
    calls = [(path, name) for name in ("A", "A3") for path in layers]
    graphs = {"A": _unary("relu"), "A2": _unary("gelu"), "A3": _unary("detach")}
    result = diff(first, Snapshot("", graphs, [*calls, ("h.2", "A2")]))
    assert result.calls == (("h.2", "", "A2"),)
    assert [(section.name, section.kind) for section in result.sections] == [("A2", "inserted")]
