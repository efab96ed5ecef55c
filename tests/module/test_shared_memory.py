"""Parameters that share memory, which ends when ranks have parts of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sp_compiler import ArgumentError
from sp_compiler.module.shared_memory import check_memory_apart


class _Model(nn.Module):
    """A linear layer beside what ``add`` makes of it."""

    def __init__(self, add: Callable[[nn.Module, Tensor], None], device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, device=device)
        add(self, self.linear.weight.detach())


def _columns(model: nn.Module, weight: Tensor) -> None:
    both = torch.zeros(6, 8)
    model.left, model.right = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])


def _slices(model: nn.Module, weight: Tensor) -> None:
    flat = torch.zeros(10)
    model.first, model.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])


def _tied(model: nn.Module, weight: Tensor) -> None:
    model.other = nn.Linear(4, 6)
    model.other.weight = model.get_parameter("linear.weight")


def _two_buffers(model: nn.Module, weight: Tensor) -> None:
    table = torch.zeros(4)
    model.register_buffer("table", table)
    model.register_buffer("rows", table[:2])


@pytest.mark.parametrize(
    "add",
    [
        lambda model, weight: model.register_buffer("view", weight[:2]),
        lambda model, weight: model.register_parameter("view", nn.Parameter(weight.t())),
        lambda model, weight: model.register_parameter("view", nn.Parameter(weight[5:, 3])),
        lambda model, weight: model.register_buffer("view", weight[1].expand(3, 4)),
        lambda model, weight: model.register_buffer("view", weight.view(torch.int16)),
    ],
)
def test_both_are_named(add: Callable[[nn.Module, Tensor], None]) -> None:
    with pytest.raises(ArgumentError, match=r"share memory.*in forward$") as caught:
        check_memory_apart(_Model(add))
    assert re.search(r"parameter 'linear\.weight'", str(caught.value))
    assert re.search(r"(buffer|parameter) 'view'", str(caught.value))


@pytest.mark.parametrize("add", [_columns, _slices, _tied, _two_buffers])
def test_elements_of_one_tensor_alone_are_not_shared(
    add: Callable[[nn.Module, Tensor], None],
) -> None:
    check_memory_apart(_Model(add))


def test_meta_tensors_have_no_memory() -> None:
    add = lambda model, weight: model.register_buffer("view", weight[:2])  # noqa: E731
    check_memory_apart(_Model(add, device="meta"))
