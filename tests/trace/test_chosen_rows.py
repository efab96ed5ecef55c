"""Rows chosen by numbers of inputs, which cannot be computed for all rows: their count is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers import parity

_MASK = torch.tensor([[True, False, True, False], [False] * 4, [True, True, False, True]])
_SIZES = torch.tensor([2, 3, 1])

Body = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """``body(conv, h, mask, sizes)`` behind a linear layer; rows are combined with each other."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.conv = nn.Conv1d(4, 8, 3)
        self.body = body

    def forward(self, x: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
        return self.body(self.conv, self.linear(x), mask, sizes).square().sum()


def _samples(conv: Any, h: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
    return conv(h[mask.any(1)])


def _tokens(conv: Any, h: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
    return h[mask].softmax(0)


BODIES: dict[str, tuple[Body, str]] = {
    "samples": (_samples, "2"),
    "tokens": (_tokens, "5"),
    "second dim": (lambda conv, h, mask, sizes: h.mT[:, :, mask[2]].softmax(0), "3"),
    "elements": (lambda conv, h, mask, sizes: h.masked_select(mask[..., None]).cumsum(0), "30"),
    "places": (lambda conv, h, mask, sizes: h[mask.nonzero(as_tuple=True)].softmax(0), "5"),
    "where": (lambda conv, h, mask, sizes: h[torch.where(mask)].cumsum(0), "5"),
    "table": (lambda conv, h, mask, sizes: h[tuple(mask.nonzero().unbind(1))].cumsum(0), "5"),
    "repeated": (lambda conv, h, mask, sizes: h.repeat_interleave(sizes, 0).cumsum(0), "6"),
    "bound": (lambda conv, h, mask, sizes: h[:, : sizes[1]].cumsum(1), "3"),
    "written": (lambda conv, h, mask, sizes: _written(h, sizes), "1"),
    "written at a mask": (lambda conv, h, mask, sizes: _written_at(h, mask), "5"),
    "put at a mask": (lambda conv, h, mask, sizes: h.index_put((mask,), h[mask].cumsum(0)), "5"),
    "size": (lambda conv, h, mask, sizes: _in_rows(h, sizes[0]).softmax(1), "2"),
}


def _written(h: Tensor, sizes: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    result[:, : sizes[2]] = h[:, : sizes[2]].cumsum(0)
    return result


def _written_at(h: Tensor, mask: Tensor) -> Tensor:
    result = h * 1
    result[mask] = h[mask].cumsum(0)
    return result


def _in_rows(h: Any, rows: Tensor) -> Tensor:
    return h.view(rows, -1)


def _all_in_turn(conv: Any, h: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
    parts = [body(conv, h, mask, sizes).square().sum() for body, _ in BODIES.values()]
    return torch.stack(parts)


def _model(body: Body) -> Model:
    torch.manual_seed(0)
    return Model(body).double()


def _inputs(mask: Tensor = _MASK) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)
    return {"x": x, "mask": mask, "sizes": _SIZES}


def test_a_count_is_read_and_its_rows_taken() -> None:
    model, inputs = _model(_tokens), _inputs()
    captured = capture(model, tuple(inputs.values()))
    assert [decision.value for decision in captured.decisions] == ["5"]
    result = captured.module(model.linear.weight, model.linear.bias, *list(inputs.values())[:2])
    torch.testing.assert_close(result[0], model(**inputs), rtol=1e-14, atol=0)


@pytest.mark.slow
def test_all_ways_to_choose_rows_are_sharded_and_right() -> None:
    model, inputs = _model(_all_in_turn), _inputs()
    case = parity.make_case(model, inputs)
    counts = {count for _, count in BODIES.values()}
    assert {decision.value for decision in case.program.decisions} == counts
    loss = model(**inputs)
    loss.backward()
    torch.testing.assert_close(case.outputs[0], loss.detach(), rtol=1e-14, atol=0)
    true = {key: value.grad for key, value in model.named_parameters()}
    assert parity.gradient_error(case.grads, true) < 1e-13
    parity.assert_parity(case, tp=2)


@pytest.mark.slow
def test_another_count_takes_another_program() -> None:
    model = _model(_tokens)
    compiled = sp_compiler.compile(_model(_tokens), tp=1)
    for mask in (_MASK, ~_MASK, _MASK.flip(0), _MASK & False):
        expected = model(**_inputs(mask))
        torch.testing.assert_close(compiled(**_inputs(mask)), expected, rtol=1e-13, atol=0)


def test_a_list_of_numbers_is_made_a_tensor() -> None:
    """``torch.tensor`` reads them, and nothing needs to."""

    def body(conv: Any, h: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
        x = h.detach()
        return h * torch.tensor([x.max(), x.min(), x[0, 0, 0]], dtype=x.dtype)[:, None, None]

    model, inputs = _model(body), _inputs()
    case = parity.make_case(model, inputs)
    loss = model(**inputs)
    loss.backward()
    true = {key: value.grad for key, value in model.named_parameters()}
    assert parity.gradient_error(case.grads, true) < 1e-14  # none through the numbers
    assert not case.program.decisions


def test_what_is_computed_for_all_rows_is_not_counted() -> None:
    captured = capture(_model(lambda conv, h, mask, sizes: h[mask]), (), _inputs())
    assert not captured.decisions


def test_one_number_of_repetitions_for_all_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match="repeat_interleave"):
        capture(
            _model(lambda conv, h, mask, sizes: h.repeat_interleave(sizes[:1], 0)), (), _inputs()
        )


def test_rows_chosen_by_activations_are_refused() -> None:
    with pytest.raises(CaptureError, match="not computed row by row"):
        capture(_model(lambda conv, h, mask, sizes: h[h.sum(-1) > 0].softmax(0)), (), _inputs())


@pytest.mark.slow
def test_beside_other_rows_they_are_refused_as_without() -> None:
    def body(conv: Any, h: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
        return h[h.sum(-1) > 0].softmax(0) + _tokens(conv, h, mask, sizes).sum()

    with pytest.raises(CaptureError, match="not computed row by row"):
        capture(_model(body), (), _inputs())
