"""Recurrent cells and bilinear forms become products that have sharding rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.ir.text import render
from tests.helpers import parity
from tests.helpers.slow import slow


class _Model(nn.Module):
    """A cell between two layers, over a few steps, and a bilinear form."""

    def __init__(self, *, bias: bool, width: int = 24) -> None:
        super().__init__()
        self.before = nn.Linear(8, width)
        self.cell = nn.GRUCell(width, width, bias)
        self.form = nn.Bilinear(width, 4, 12, bias)
        self.after = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.before(x).tanh()
        state = torch.zeros_like(inputs[:, 0])
        for step in range(2):
            state = self.cell(inputs[:, step], state)
        return self.after(self.form(state, x[:, 0, :4])).square().sum()


@pytest.mark.parametrize("bias", [True, slow(False)])
def test_values_and_gradients(bias: bool) -> None:
    """Numbers of eager on one device, and of ranks that have some of the gates and outputs."""
    torch.manual_seed(0)
    model = _Model(bias=bias).double()
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    case = parity.make_case(model, {"x": x})
    loss = model(x)
    torch.testing.assert_close(case.outputs[0], loss, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(case.grads[name], grad, rtol=1e-11, atol=1e-11)
    text = "".join(render(region.module.graph) for region in case.program.regions)
    assert "gru_cell" not in text
    assert "bilinear" not in text
    for tp in (2, 3):
        program = parity.assert_parity(case, tp=tp)
        assert program.param_placements["cell.weight_ih"].is_sharded
        assert program.param_placements["form.weight"].is_sharded
