"""Checks of ids in front of what would end the use of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.passes.normalize import checked_ids, normalize
from tests.helpers.normalized import body, normalized, randn, text

_IDS = torch.tensor([1, 0, 3])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_ids, "DEVICES", ("cpu",))


def _model(table: Tensor, bags: Tensor, ids: Tensor) -> Tensor:
    logits = F.embedding(ids, table) + F.embedding_bag(ids.view(3, 1), bags)
    image = logits.view(1, 8, 3).expand(3, 8, 3)
    of_pixels = F.cross_entropy(image, ids.expand(3, 3), ignore_index=0)
    of_pixels = of_pixels + F.nll_loss(image.log_softmax(1), ids.expand(3, 3), ignore_index=2)
    return F.cross_entropy(logits, ids) + F.cross_entropy(logits[0], ids[0]) + of_pixels


@pytest.mark.usefixtures("as_on_a_gpu")
def test_in_front_of_lookups_and_losses() -> None:
    captured = normalized(_model, randn(5, 8, grad=True), randn(9, 8, grad=True), _IDS)
    lines = body(captured)
    checks = [line.split(" = ")[1] for line in lines if "checked_ids" in line]
    assert [check.split(", ", 1)[1] for check in checks] == [
        "5, None, 'an embedding of {} rows', 1) : i64[3]",
        "9, None, 'an embedding of {} rows', 1) : i64[3]",
        "8, 0, 'a loss over {} classes, as target', 1) : i64[9]",
        "8, 2, 'a loss over {} classes, as target', 1) : i64[3, 3]",
        "8, -100, 'a loss over {} classes, as target', 1) : i64[3]",
        "8, -100, 'a loss over {} classes, as target', 1) : i64[]",
    ]
    before = text(captured)
    normalize(captured)
    assert text(captured) == before


@pytest.mark.usefixtures("as_on_a_gpu")
def test_not_where_nothing_is_looked_up() -> None:
    """Probabilities of classes, and rows that the model picks by what it computed."""

    def model(x: Tensor, target: Tensor) -> Tensor:
        best = x.argmax(0)
        rows = x[best] + x.index_select(0, best[:3]).sum()
        return F.cross_entropy(x, target.softmax(-1)) + rows.gather(1, best[:8, None]).sum()

    captured = normalized(model, randn(8, 8, grad=True), randn(8, 8))
    assert "checked_ids" not in text(captured)


def test_not_on_the_host() -> None:
    captured = normalized(_model, randn(5, 8, grad=True), randn(9, 8, grad=True), _IDS)
    assert "checked_ids" not in text(captured)


class Tagger(nn.Module):
    """Weighted classes of tokens; the positions' table is whole on every rank."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 7)
        self.register_buffer("weights", torch.linspace(0.5, 2, 7))

    def forward(self, ids: Tensor, places: Tensor, target: Tensor) -> Tensor:
        logits = self.head(self.table(ids) + self.positions(places))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), self.weights)


_CALL = (torch.arange(8).view(2, 4), torch.arange(4), torch.tensor([[0, -100, 3, 6], [1, 2, 0, 5]]))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("tp", [1, 2])
def test_numbers(tp: int) -> None:
    result = sp_compiler.verify(Tagger().double(), (_CALL, {}), tp=tp)
    assert result.ok, str(result)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("argument", "wrong", "what"),
    [(0, 12, "an embedding of 12 rows"), (1, 6, "an embedding of 6"), (2, 7, "a loss over 7")],
)
def test_each_is_named_on_one_rank(argument: int, wrong: int, what: str) -> None:
    module: Any = sp_compiler.compile(Tagger(), tp=1)
    call = [x.clone() for x in _CALL]
    module(*call).backward()
    call[argument].view(-1)[-1] = wrong
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for {what}"):
        module(*call)
