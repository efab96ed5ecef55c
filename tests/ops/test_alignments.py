"""Losses over alignments, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.base.placement import I
from sp_compiler.ops.alignments import CTC_LOSS, CTC_LOSS_BACKWARD, LEFT_OUT
from sp_compiler.ops.communicator import Communicator, running_on
from tests.helpers.own_operators import Case, assert_registered, assert_right
from tests.helpers.slow import slow

_GENERATOR = torch.Generator().manual_seed(0)
_SCORES = torch.randn(7, 3, 5, dtype=torch.float64, generator=_GENERATOR).log_softmax(-1)
_LABELS = torch.randint(1, 5, (3, 3), generator=_GENERATOR)
_INPUTS, _TARGETS = torch.tensor([7, 5, 2]), torch.tensor([3, 1, 2])
_KEPT = torch.arange(3) < _TARGETS[:, None]
# One sequence behind the other.
_IN_ONE_DIM = torch.where(_KEPT, _LABELS, LEFT_OUT).flatten()


@pytest.mark.parametrize("zero_infinity", [True, False])
@pytest.mark.parametrize("labels", [_LABELS, _IN_ONE_DIM], ids=["padded", "in one dim"])
def test_loss(labels: Tensor, zero_infinity: bool) -> None:
    """The third sequence may have the same label twice, for which its inputs are too few."""
    labels = labels.clone()
    if zero_infinity:
        labels.view(3, 3)[2, :2] = 1

    def dense(scores: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
        given = targets if targets.dim() == 2 else targets[targets != LEFT_OUT]
        return F.ctc_loss(
            scores, given, inputs, lengths, 2, reduction="none", zero_infinity=zero_infinity
        )

    given = [_SCORES, torch.where(labels == 2, 3, labels), _INPUTS, _TARGETS]
    case = Case(CTC_LOSS, dense, given, (2, zero_infinity, 2), (I, I, I, I), (I,))
    assert_right(case, 2)


def test_registered() -> None:
    rest = (_LABELS, _INPUTS, _TARGETS, 0, True, 1)
    assert_registered(CTC_LOSS, _SCORES.clone().requires_grad_(), *rest)
    assert_registered(CTC_LOSS_BACKWARD, torch.ones(3, dtype=torch.float64), _SCORES, *rest)


def test_as_many_labels_as_the_lengths_say() -> None:
    """Torch refuses others too: of a batch that was cut they would be labels of other sequences."""
    lengths = _TARGETS - torch.tensor([1, 0, 0])
    with running_on(Communicator(None, 0, 1)), pytest.raises(RuntimeError, match="size 5"):
        CTC_LOSS.overload(_SCORES, _IN_ONE_DIM, _INPUTS, lengths, 0, True, 1)


class Recognizer(nn.Module):
    """Trains as speech models do; ``form`` is how the labels are given."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.form = form

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.up(x).tanh()).log_softmax(-1).transpose(0, 1)
        kept = labels >= 0
        lengths = kept.sum(-1)
        inputs = torch.full_like(lengths, x.shape[1])
        if self.form == "selected":
            return F.ctc_loss(scores, labels.masked_select(kept), inputs, lengths)
        if self.form == "numbers":
            return F.ctc_loss(scores, labels.abs(), (9, 8), (3, 2), reduction="sum")  # type: ignore[arg-type]
        if self.form == "one sequence":
            return F.ctc_loss(scores[:, 0], labels[0], inputs[0], lengths[0], reduction="none")
        return nn.CTCLoss(blank=3, zero_infinity=True)(scores, labels, inputs, lengths)


@pytest.mark.parametrize("form", ["selected", *map(slow, ("padded", "numbers", "one sequence"))])
def test_a_model(form: str) -> None:
    torch.manual_seed(0)
    model = Recognizer(form).double()
    labels = torch.tensor([[1, 2, 4], [2, 1, -1]])
    report = sp_compiler.verify(model, ((torch.randn(2, 9, 6).double(), labels), {}), tp=2)
    assert report.ok, str(report)
    assert report.worst < 1e-12


def test_a_model_without_numbers() -> None:
    """On the meta device, of which torch has no state of autocast."""
    with torch.device("meta"):
        model = Recognizer("padded")
    inputs = torch.randn(2, 9, 6), torch.tensor([[1, 2, 4], [2, 1, -1]])
    (bare, real) = (sp_compiler.plan(m, (inputs, {}), tp=2) for m in (model, Recognizer("padded")))
    assert bare.work == real.work
