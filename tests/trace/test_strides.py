"""Reads of memory by strides: those of the model's own code, whatever the graph makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.errors import UnsupportedError
from tests.helpers.normalized import normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_WEIGHT = randn(4, 4)


def _windows(x: Tensor) -> Tensor:
    """Overlapping windows of three, as Longformer makes them, of tokens that are not dense."""
    x = x.transpose(0, 1)
    batch, length, token = x.stride()
    return x.as_strided((2, 4, 3, 4), (batch, length, length, token))


def _written(x: Tensor) -> Tensor:
    """Every second row, written through its place in memory."""
    x = x * 1
    x.as_strided((3, 4), (8, 1)).mul_(3)
    return x


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "as the operand lies": lambda x: x.as_strided((3, 4, 2), (8, 1, 4)),
    "through a transpose": lambda x: (x * 2).transpose(0, 1).as_strided((6, 2, 4), (8, 4, 1)),
    "of a copy": lambda x: x.transpose(0, 1).contiguous().as_strided((2, 3, 4), (4, 8, 1)),
    "of a product": lambda x: F.linear(x.mT.mT.transpose(0, 1), _WEIGHT).as_strided((24,), (1,)),
    "windows": _windows,
    "from where a slice begins": lambda x: x[2:].as_strided((2, 4), (8, 1)),
    "of a part of each row": lambda x: x[:, 1:].as_strided((3, 2), (16, 1), 4),
    "of what is expanded": lambda x: x[:, :1].expand(-1, 5, -1).as_strided((6, 2, 4), (8, 0, 1)),
    "of what was read so": lambda x: x.mT.as_strided((6, 8), (8, 1)).as_strided((2, 3), (1, 9)),
    "in place": _written,
}
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "in front of a slice": (
        lambda x: x[2:].as_strided((2, 4), (8, 1), 0),
        "outside of its operand",
    ),
    "between two slices": (lambda x: x[:, 1:].as_strided((6, 8), (8, 1)), "outside of its operand"),
    "twice": (
        lambda x: torch.as_strided_scatter(x, x[0, 0, :3].expand(2, 3), (2, 3), (1, 1)),
        "writes an element twice",
    ),
}


@pytest.mark.parametrize("name", READS)
def test_values_and_gradients(name: str) -> None:
    x = randn(6, 2, 4, grad=True)
    expected = READS[name](x)
    (found,) = outputs(normalized(READS[name], x), x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    weights = randn(*expected.shape)
    grad, true = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(grad, true, rtol=1e-13, atol=1e-13)


def test_the_gradient_of_a_write() -> None:
    """That of PyTorch's own ``as_strided_scatter`` is another than the function's."""

    def scattered(x: Tensor) -> Tensor:
        return torch.as_strided_scatter(x, x[:3, 0] * 2, (3, 4), (8, 1))

    x, weights = randn(6, 2, 4, grad=True), randn(6, 2, 4)
    rows = torch.arange(3)
    expected = x.index_put((rows, torch.zeros_like(rows)), x[:3, 0] * 2)
    (found,) = outputs(normalized(scattered, x), x)
    torch.testing.assert_close(found, expected)
    grad, true = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(grad, true)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        normalized(function, randn(6, 2, 4, grad=True))
