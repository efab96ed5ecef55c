"""Containers of the user's own as arguments and results: registered, or what the error says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from sp_compiler import (
    CaptureError,
)
from tests.helpers.users import compiled


@dataclasses.dataclass
class Boxed:
    """A container that nobody registered."""

    value: Tensor


@dataclasses.dataclass
class Registered:
    """A container that the user did register."""

    value: Tensor


class Boxing(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Any) -> Any:
        return self.kind(self.linear(x.value if isinstance(x, self.kind) else x))


def test_classes_that_are_not_registered() -> None:
    x = torch.ones(2, 8)
    for argument in (x, Boxed(x)):
        with pytest.raises(CaptureError, match=r"register_dataclass\(YourClass\)"):
            compiled(lambda: Boxing(Boxed))(argument)
    torch.export.register_dataclass(Registered)
    result = compiled(lambda: Boxing(Registered))(Registered(x))
    assert type(result) is Registered
    result.value.sum().backward()


class Late(nn.Module):
    """Defines, as an import inside forward would, a class that registers itself; too late."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        @dataclasses.dataclass
        class Result(transformers.utils.ModelOutput):  # type: ignore[misc]
            y: Tensor | None = None

        return Result(y=self.linear(x))


def test_classes_that_are_first_seen_inside_forward() -> None:
    with pytest.raises(CaptureError, match="imported, and made once, outside of forward"):
        compiled(Late)(torch.ones(2, 8))
