"""Layers traced in another order are one region; whatever else differs keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from sp_compiler.base.placement import I, Placement, S
from sp_compiler.ir.fx import calls
from sp_compiler.ir.hints import wishes_of
from sp_compiler.ir.program import Program
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import distinct, outline
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.reference import run_captured, run_program
from sp_compiler.verification.verify import verify
from tests.helpers.slow import slow
from tests.passes.test_outline import check_program, outlined
from tests.trace.test_export import gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
sp = torch.ops.sp_compiler
_SIZE, _HEADS = 8, 2


class Layer(nn.Module):
    """Attention and a gate, whose independent products are made in one order or the other."""

    def __init__(
        self,
        turned: bool = False,
        eps: float = 1e-5,
        scale: float | None = None,
        minus: bool = False,
        p: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        self.turned, self.scale, self.minus, self.p = turned, scale, minus, p
        self.norm = nn.LayerNorm(_SIZE, eps=eps)
        self.q, self.k, self.v, self.o, self.gate = (nn.Linear(_SIZE, _SIZE) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(self.gate.weight.dtype)
        h = self.norm(x)
        names = ("v", "k", "q") if self.turned else ("q", "k", "v")
        heads = {name: getattr(self, name)(h) for name in names}
        q, k, v = (heads[name].unflatten(-1, (_HEADS, -1)).transpose(1, 2) for name in "qkv")

        def attended() -> Tensor:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return F.dropout(self.o(y.transpose(1, 2).flatten(2)), self.p[0], self.training)

        def gated() -> Tensor:
            return F.dropout(self.gate(h).sigmoid(), self.p[1], self.training)

        if self.turned:
            right = gated()
            left = attended()
        else:
            left = attended()
            right = gated()
        return x + (left - right if not self.minus else right - left), left * right


class Model(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.embed = nn.Linear(_SIZE, _SIZE)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.embed(x), torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, side = layer(x)
            total = total + side.square().mean()
        return x.square().mean() + total


def _input() -> Tensor:
    return torch.randn(2, 6, _SIZE, generator=torch.Generator().manual_seed(0))


def _model(*layers: Layer) -> Model:
    torch.manual_seed(0)
    model = Model(*layers)
    for parameter in model.parameters():  # so that no two weights are alike
        nn.init.normal_(parameter, std=0.5)
    return model


def _layers(program: Program) -> list[str]:
    return [call.region.name for call in program.calls if call.path]


def test_layers_traced_in_another_order_are_one_region() -> None:
    """Also a third, in the order of the second: it is found by its text."""
    _, program = outlined(_model(Layer(), Layer(True), Layer(True), Layer()), _input())
    check_program(program)
    assert _layers(program) == ["Layer"] * 4
    for call in program.calls:
        for ref, name in zip(call.args, call.region.input_names, strict=True):
            if call.path and ref.kind == "param":
                assert ref.name == f"{call.path}.{name}"


def _identity_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take isomorphic graphs for graphs of equal order."""
    found = distinct.DistinctRegions._reordered_use

    def unturned(self: Any, *args: Any) -> Any:
        use = found(self, *args)
        if use is None:
            return None
        return replace(use, inputs=sorted(use.inputs), outputs=sorted(use.outputs))

    monkeypatch.setattr(distinct.DistinctRegions, "_reordered_use", unturned)


def _losses_and_gradients(model: nn.Module) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    """Of the captured graph and of the program."""
    captured, program = outlined(model, _input().double())
    leaves, _ = flatten_inputs((_input().double(),), {})
    named = dict(model.named_parameters()), dict(model.named_buffers())
    flat, shared = run_captured(captured, *named, leaves), run_program(program, *named, leaves)
    losses = [result.outputs[0] for result in (flat, shared)]
    return [(loss.detach(), gradients(model, loss)) for loss in losses]


def test_the_program_computes_what_the_model_does_in_its_own_order() -> None:
    model = _model(Layer(), Layer(True)).double()
    (loss, grads), (shared_loss, shared_grads) = _losses_and_gradients(model)
    assert torch.equal(loss, model(_input().double()))
    assert torch.equal(loss, shared_loss)
    for name, grad in grads.items():
        # The summands of a gradient are added in the order of the backward, which is another.
        torch.testing.assert_close(shared_grads[name], grad, rtol=1e-13, atol=1e-15)


def test_values_in_their_own_order_are_seen_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    _identity_uses(monkeypatch)
    (loss, _), (wrong, _) = _losses_and_gradients(_model(Layer(), Layer(True)).double())
    assert abs(float(loss - wrong)) > 1e-3


@pytest.mark.parametrize("p", [slow((0.0, 0.0)), (0.1, 0.2)])
def test_two_ranks_compute_the_gradients_of_the_model(p: tuple[float, float]) -> None:
    model = _model(Layer(p=p), Layer(True, p=p))
    report = verify(model, ((_input(),), {}), tp=2)
    assert report.ok, str(report)
    assert report.worst < 1e-10


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "difference",
    [{"eps": 1.0000001e-5}, {"scale": 0.3}, {"minus": True}, {"p": (0.1, 0.0)}],
    ids=str,
)
def test_layers_that_differ_in_a_number_or_in_wiring_stay_two(
    turned: bool, difference: dict[str, Any]
) -> None:
    """In the same order, where their texts differ, and in another, where no node matches."""
    _, program = outlined(_model(Layer(), Layer(turned, **difference)), _input())
    assert _layers(program) == ["Layer", "Layer2"]


@pytest.mark.parametrize("turned", [False, True])
def test_dtypes_stay_apart(turned: bool) -> None:
    """In the dtype of what comes in alone, too."""
    model = _model(Layer(), Layer(turned), Layer(turned))
    model.layers[1].double()
    model.layers[2].double()
    assert _layers(outlined(model, _input())[1]) == ["Layer", "Layer2", "Layer3"]


@pytest.mark.parametrize("turned", [False, True])
def test_frozen_weights_stay_apart(turned: bool) -> None:
    model = _model(Layer(), Layer(turned))
    model.layers[1].k.requires_grad_(False)
    assert _layers(outlined(model, _input())[1]) == ["Layer", "Layer2"]


class Renamed(Layer):
    """A layer that calls its weight for the queries another name."""

    def __init__(self) -> None:
        super().__init__(turned=True)
        self.queries = self.q
        del self.q

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.__dict__["q"] = self.queries
        try:
            return super().forward(x)
        finally:
            del self.__dict__["q"]


def test_weights_of_other_names_stay_apart() -> None:
    """Else a reader would find the queries of one layer under the keys' name."""
    assert _layers(outlined(_model(Layer(), Renamed()), _input())[1]) == ["Layer", "Renamed"]


def test_sites_of_dropouts_are_those_of_the_one_region() -> None:
    """Each use has a seed of its own, so that equal sites of two layers draw other masks."""
    p = (0.1, 0.2)
    _, program = outlined(_model(Layer(p=p), Layer(True, p=p)), _input())
    assert _layers(program) == ["Layer", "Layer"]
    region = program.calls[1].region
    sites = [
        (node.args[2], node.args[3]) for node in calls(region.module.graph, sp.dropout.default)
    ]
    assert sites == [(0.1, 0), (0.2, 1)]


class Noisy(nn.Module):
    """Draws from torch's generator, in one order or the other."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.linear = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        if self.turned:
            late = torch.rand_like(h)
            early = torch.rand_like(x)
        else:
            early = torch.rand_like(x)
            late = torch.rand_like(h)
        return h * early - late, h


@pytest.mark.parametrize(("turned", "regions"), [(False, 1), (True, 2)])
def test_random_numbers_are_drawn_in_the_order_of_the_model(turned: bool, regions: int) -> None:
    """They come from one generator: another order is other numbers."""
    model: Any = _model(Noisy(False), Noisy(turned))  # type: ignore[arg-type]
    program = outline(capture(model, (_input(),), {}))
    assert len(set(_layers(program))) == regions


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("hinted", "regions"), [("layers.*.q", 1), ("layers.1.q", 2)])
def test_hints_keep_layers_apart_that_they_tell_apart(
    turned: bool, hinted: str, regions: int
) -> None:
    captured = capture(_model(Layer(), Layer(turned)), (_input(),), {})
    normalize(captured)
    program = outline(captured, wishes_of({hinted: Shard(0)}, captured.parameters))
    assert len(set(_layers(program))) == regions


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("stored", "regions"),
    [({"0": S(0), "1": S(0)}, 1), ({"0": S(0)}, 1), ({"0": S(0), "1": I}, 2)],
)
def test_layers_that_are_stored_differently_are_apart(
    turned: bool, stored: dict[str, Placement], regions: int
) -> None:
    """They had the placements of the first, whatever those of the others were."""
    captured = capture(_model(Layer(), Layer(turned)), (_input(),), {})
    normalize(captured)
    placements = {f"layers.{layer}.q.weight": where for layer, where in stored.items()}
    assert placements.keys() <= captured.parameters.keys()
    assert len(set(_layers(outline(captured, stored=placements)))) == regions
