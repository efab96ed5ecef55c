"""Recurrent layers with dropout between them become one operator per layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.ir.text import render
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers.slow import slow_but
from tests.helpers.users import batch, compiled, gradients

KINDS: dict[str, Callable[[float], nn.RNNBase]] = {
    "lstm": lambda p: nn.LSTM(8, 6, num_layers=3, dropout=p, batch_first=True),
    "lstm, both ways, projected": lambda p: nn.LSTM(
        8, 6, num_layers=2, dropout=p, bidirectional=True, proj_size=4
    ),
    "gru, without biases": lambda p: nn.GRU(8, 6, num_layers=2, bias=False, dropout=p),
    "rnn": lambda p: nn.RNN(8, 6, num_layers=2, dropout=p, nonlinearity="relu"),
}


class _Model(nn.Module):
    """Outputs of every step and the last states of every layer; the first are not zeros."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        self.rnn = KINDS[kind](p)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs, states = self.rnn(x, self.rnn(x)[1])
        return (outputs, *(states if isinstance(states, tuple) else (states,)))


def _model(kind: str, p: float) -> _Model:
    torch.manual_seed(0)
    return _Model(kind, p).double()


@pytest.mark.parametrize("kind", slow_but(("lstm, both ways, projected",), KINDS))
def test_without_a_drop_it_is_the_operator_itself(kind: str) -> None:
    """All but never dropped: of one number in 10**300 none is, and the layers are apart."""
    rare, never = compiled(lambda: _model(kind, 1e-300)), _model(kind, 0.0)
    found, expected = rare(batch(3, 5)), never(batch(3, 5))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one in (found, expected):
        sum(each.square().sum() for each in one).backward()
    torch.testing.assert_close(gradients(rare), gradients(never), rtol=1e-10, atol=1e-12)


def test_layers_are_separated_only_where_something_is_dropped() -> None:
    dropping = capture(_model("rnn", 0.5), (batch(3, 5),))
    normalize(dropping)
    text = render(dropping.module.graph)
    assert text.count("rnn_relu.input") == 4
    assert text.count("sp_compiler.dropout") == 2
    for model in (_model("rnn", 0.0), _model("rnn", 0.5).eval()):
        captured = capture(model, (batch(3, 5),))
        normalize(captured)
        assert render(captured.module.graph).count("rnn_relu.input") == 2


def test_what_one_layer_hands_to_the_next_is_dropped() -> None:
    module = compiled(lambda: _model("rnn", 0.5))
    first, second = module(batch(3, 5)), module(batch(3, 5))
    assert not torch.equal(first[0], second[0])  # other masks in every call
    torch.testing.assert_close(first[1][0], second[1][0])  # the first layer has none
    module.eval()
    torch.testing.assert_close(module(batch(3, 5)), _model("rnn", 0.5).eval()(batch(3, 5)))


class _FromStates(nn.Module):
    """Reads the last states in the block that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(8, 6, bidirectional=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, cell) = self.lstm(x)
        return outputs.sum(0) + torch.cat([*self.linear(hidden), *cell]).view(2, -1, 12).sum(0)


@pytest.mark.slow
def test_states_keep_their_shape() -> None:
    """Those of an LSTM, for any number of sequences, one among them."""
    torch.manual_seed(0)
    model = _FromStates().double()
    module = compiled(lambda: copy.deepcopy(model))
    for seq, num_sequences in ((4, 3), (5, 2), (4, 1)):
        x = torch.randn(seq, num_sequences, 8, dtype=torch.float64)
        found, expected = module(x), model(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for one in (found, expected):
            one.square().sum().backward()
    torch.testing.assert_close(gradients(module), gradients(model), rtol=1e-10, atol=1e-12)
