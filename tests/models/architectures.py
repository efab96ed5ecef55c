"""Two tiny configurations of every architecture that people train, as a table.

``dividing``: 8 heads, 4 or 8 kv heads, vocabulary 128, widths that 8 divides. ``awkward``: 4 heads,
2 kv heads, vocabulary 131, widths and lengths that 8 does not divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from tests.helpers import parity
from tests.models import decoders, encoders, zoo  # noqa: F401 - they add their rows, in this order
from tests.models.architecture import AWKWARD as AWKWARD
from tests.models.architecture import CONFIGURATIONS as CONFIGURATIONS
from tests.models.architecture import RANKS as RANKS
from tests.models.architecture import TABLE, Kwargs
from tests.models.architecture import Size as Size
from tests.models.architecture import size as size


def turn(name: str, configuration: str) -> int:
    """The number of ranks that the tests run: 2, 4 and 8 take turns over the architectures."""
    first = 1 if configuration == "awkward" else 0
    return RANKS[(names().index(name) + first) % len(RANKS)]


def names(*, decoder_only: bool = False) -> list[str]:
    """Every architecture, in a fixed order."""
    return [name for name, item in TABLE.items() if item.decoder_only or not decoder_only]


def build(name: str, size: Size) -> nn.Module:
    """``name`` in float64 and train mode, with parameters of order one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TABLE[name].make(size)
    zoo.randomise(model, 0)
    return model.double().train()


def inputs(name: str, size: Size) -> Kwargs:
    """Keyword arguments of a call."""
    return TABLE[name].inputs(size, torch.Generator().manual_seed(0))


def case(name: str, size: Size) -> parity.Case:
    """``name`` captured in float64, and its true result.

    New tensors are float64 too, as what a model compares them with: the smallest number of that
    type, say, which float32 does not have.
    """
    with float64():
        return parity.make_case(build(name, size), inputs(name, size))


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
