"""Roles of dims that one region cannot know of by itself: channels in front of tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.base.placement import Placement, R, S
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.shard import Sharded, shard
from tests.helpers import parity


class Sounds(nn.Module):
    """Convolutions of frames, and a projection of each frame; what is between has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(6, 24), (24, 24), (24, 48)]
        self.layers = nn.ModuleList([nn.Conv1d(*size, 3, padding=1) for size in sizes])
        self.head = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x.transpose(1, 2))


class Pixels(nn.Module):
    """Convolutions of images between layers without a parameter, of which some see no other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv2d(6, 24, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Hardswish(), nn.Conv2d(24, 12, 3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Words(nn.Module):
    """Features behind tokens, where positions and a product along them make both features."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 12, 24))
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.head = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = x + layer(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


_INPUTS = {Sounds: (2, 6, 12), Pixels: (2, 6, 12, 12), Words: (2, 12, 24)}


@functools.cache
def _case(kind: Any) -> parity.Case:
    torch.manual_seed(0)
    x = torch.randn(_INPUTS[kind], dtype=torch.float64)
    return parity.make_case(kind().double(), {"x": x})


def _sharded(kind: Any, **options: Any) -> Sharded:
    return shard(_case(kind).program, CompileOptions(tp=2, **options))


def _crossings(result: Sharded) -> set[Placement]:
    """Placements of what calls pass to each other."""
    return {
        placement
        for call in result.program.calls
        for placement, ref in zip(call.region.input_placements, call.args, strict=True)
        if ref.kind == "call"
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", [Sounds, Pixels])
def test_channels_cross_regions_in_shards(kind: Any, sequence_parallel: bool) -> None:
    result = _sharded(kind, sequence_parallel=sequence_parallel)
    placements = result.param_placements
    weights = {name: placements[name] for name in placements if "layers" in name}
    assert set(weights.values()) == {S(0)}
    assert _crossings(result) == {S(1)}


def test_features_behind_tokens_are_none() -> None:
    result = _sharded(Words)
    assert _crossings(result) == {S(0), R}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", _INPUTS)
def test_numbers(kind: Any, ranks: int) -> None:
    found = _case(kind)
    parity.assert_step(found, parity.compiled(found, tp=ranks), tolerance=1e-12)
