"""Models of which a part is on the meta device."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from sp_compiler.trace.export import capture
from sp_compiler.trace.partly_meta import all_on_meta


class Tied(nn.Module):
    """A projection on meta between two uses of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.inner = nn.Linear(8, 8, device="meta")
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.table(ids)) * self.scale)


def test_ties_stay_and_numbers_come_back() -> None:
    model = Tied()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with all_on_meta(model):
        assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
        assert model.head.weight is model.table.weight
        assert model.head.weight.requires_grad
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is value for name, value in before.items())


def test_the_capture_is_that_of_a_model_on_one_device() -> None:
    ids = torch.arange(6).reshape(2, 3)
    partly, full = capture(Tied(), (ids,)), capture(Tied().to_empty(device="cpu"), (ids,))
    assert [(ref.kind, ref.name) for ref in partly.refs] == [(r.kind, r.name) for r in full.refs]
    assert str(partly.module.graph) == str(full.module.graph)
    assert {node.meta["val"].device.type for node in partly.placeholders} == {"cpu"}


def test_a_model_with_numbers_is_left_alone() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight
    with all_on_meta(model):
        assert model.weight is weight


def test_a_captured_tensor_on_meta_can_be_given_numbers() -> None:
    """No weak reference to it is left, with which torch swaps no tensors."""
    model = Tied().to("meta")
    captured = capture(model, (torch.arange(6).reshape(2, 3),))
    for value in (*model.parameters(), *model.buffers()):
        assert weakref.getweakrefcount(value) == 0
    assert captured.refs
